"""Files that are whole or not there, and the folders that trainers save checkpoints in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to, and put that file in the place of `path` once the block has ended without an error.

    A reader sees either the whole old file or the whole new one, whatever happens. Missing folders are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    yield partial
    with open(partial, "rb") as written:
        os.fsync(written.fileno())
    os.replace(partial, path)


def checkpoint_folders(output_dir: str | os.PathLike[str], prefix: str = "checkpoint-") -> list[Path]:
    """The folders `<prefix><step>` of a run, newest first; none if there is no such run."""
    folder = Path(output_dir)
    steps = {
        int(path.name[len(prefix) :]): path
        for path in (folder.glob(f"{prefix}*") if folder.is_dir() else ())
        if path.is_dir() and path.name[len(prefix) :].isdigit()
    }
    return [steps[step] for step in sorted(steps, reverse=True)]
