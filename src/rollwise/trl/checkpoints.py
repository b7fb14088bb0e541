"""Finding the checkpoint to go on from."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "checkpoint-"


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of a run that was saved to its end; None if there is none.

    transformers writes `trainer_state.json` last, and the trainer writes the scheduler's state first: where that file
    is whole, so is the checkpoint. One whose saving was interrupted is passed over with a warning.
    """
    folder = Path(output_dir)
    steps = {
        int(path.name[len(_PREFIX) :]): path
        for path in (folder.glob(f"{_PREFIX}*") if folder.is_dir() else ())
        if path.is_dir() and path.name[len(_PREFIX) :].isdigit()
    }
    for _, path in sorted(steps.items(), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            logger.warning("%s is left out: its saving was interrupted.", path)
        else:
            return str(path)
    return None
