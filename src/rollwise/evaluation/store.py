"""Samples on the disk: parts while a benchmark goes on, one Parquet file once it is done. Whole or not there.

A benchmark's folder holds `settings.json` (what the samples were made with), `problems.parquet` (problem_id, problem,
answer, level), and `samples.parquet`, one row per sample with the columns of `SAMPLE_COLUMNS`. Until all problems are
done the rows lie in `parts/<number of the first problem>.parquet`, each with whole problems.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollwise.errors import ConfigError, StateError
from rollwise.evaluation.benchmarks import EvaluationProblem
from rollwise.files import replacing

SETTINGS, PROBLEMS, SAMPLES, PARTS = "settings.json", "problems.parquet", "samples.parquet", "parts"

SAMPLE_COLUMNS = {
    "problem_id": "string",
    "sample": "int32",
    "completion": "string",
    "extracted": "string",
    "verdict": "string",
    "reason": "string",
    "tokens": "int32",
    "finished": "bool",
}
"""Columns of a sample: `verdict` is right, wrong or unscored, `reason` says why unscored; `finished`: not cut off."""

Row = dict[str, Any]


def digest(problems: Sequence[EvaluationProblem]) -> str:
    """Return a hash of problems and answers, so that samples are never taken for those of other problems."""
    content = json.dumps([asdict(problem) for problem in problems], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


class SampleStore:
    """The samples of one model on one benchmark.

    Args:
        folder: The benchmark's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def exists(self) -> bool:
        """Tell whether an evaluation has begun here."""
        return (self.folder / SETTINGS).is_file()

    def begin(self, settings: Mapping[str, Any], problems: Sequence[EvaluationProblem], *, overwrite: bool) -> None:
        """Start, or go on with what is here.

        Args:
            settings: What the samples depend on, as JSON holds it.
            problems: The benchmark's.
            overwrite: Delete samples that are here.

        Raises:
            ConfigError: The samples here were made with other settings or problems.
        """
        wanted = dict(settings) | {"problems": digest(problems)}
        if overwrite:
            self.clear()
        if self.exists() and self._files():  # settings alone are of a run that ended before its first sample
            made = self.settings()
            if different := [name for name in wanted if made.get(name) != wanted[name]]:
                name = different[0]
                raise ConfigError(
                    f"{str(self.folder)!r} holds samples made with other settings ({name} was {made.get(name)!r}, is "
                    f"{wanted[name]!r}): take another --output, or delete them with --overwrite"
                )
            return
        self._write(PROBLEMS, [asdict(problem) for problem in problems], _problem_schema())
        self._write_settings(wanted)

    def settings(self) -> dict[str, Any]:
        """Read what the samples here were made with.

        Raises:
            StateError: The file is damaged.
        """
        path = self.folder / SETTINGS
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StateError(
                f"{str(path)!r} is damaged ({error}): delete {str(self.folder)!r}, or --overwrite"
            ) from None
        return found

    def problems(self) -> list[EvaluationProblem]:
        """Read the problems."""
        import pyarrow.parquet as pq

        return [EvaluationProblem(**row) for row in pq.read_table(self.folder / PROBLEMS).to_pylist()]

    def rows(self) -> list[Row]:
        """Read all samples that are there, in the order of the problems."""
        import pyarrow.parquet as pq

        found: list[Row] = []
        for path in self._files():
            found += pq.read_table(path).to_pylist()
        return found

    def add(self, first: int, rows: Sequence[Row]) -> None:
        """Store all samples of some problems, at once.

        Args:
            first: Number of the first of these problems.
            rows: Their samples.
        """
        self._write(f"{PARTS}/{first:06d}.parquet", rows, _sample_schema())

    def finish(self, rows: Sequence[Row] | None = None) -> None:
        """Put all samples into one file.

        Args:
            rows: What to write; by default what the parts hold.
        """
        if rows is None and (self.folder / SAMPLES).is_file():
            shutil.rmtree(self.folder / PARTS, ignore_errors=True)
            return
        self._write(SAMPLES, self.rows() if rows is None else rows, _sample_schema())
        shutil.rmtree(self.folder / PARTS, ignore_errors=True)

    def replace(self, rows: Sequence[Row], **settings: Any) -> None:
        """Store the same samples with other verdicts, and what these were made with."""
        if (self.folder / SAMPLES).is_file():
            self.finish(rows)
        else:
            by_problem: dict[str, list[Row]] = {}
            for row in rows:
                by_problem.setdefault(row["problem_id"], []).append(row)
            for path in self._files():
                ids = dict.fromkeys(self._ids(path))
                self.add(int(path.stem), [row for problem_id in ids for row in by_problem[problem_id]])
        self._write_settings(self.settings() | settings)

    def clear(self) -> None:
        """Delete what is here; nothing else that lies in the folder."""
        (self.folder / SETTINGS).unlink(missing_ok=True)
        (self.folder / SAMPLES).unlink(missing_ok=True)
        shutil.rmtree(self.folder / PARTS, ignore_errors=True)
        (self.folder / PROBLEMS).unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        whole = self.folder / SAMPLES
        return [whole] if whole.is_file() else sorted((self.folder / PARTS).glob("*.parquet"))

    def _ids(self, path: Path) -> list[str]:
        import pyarrow.parquet as pq

        ids: list[str] = pq.read_table(path, columns=["problem_id"])["problem_id"].to_pylist()
        return ids

    def _write(self, name: str, rows: Sequence[Mapping[str, Any]], schema: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with replacing(self.folder / name) as partial:
            pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), partial)

    def _write_settings(self, settings: Mapping[str, Any]) -> None:
        with replacing(self.folder / SETTINGS) as partial:
            partial.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _sample_schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [(name, getattr(pa, "bool_" if kind == "bool" else kind)()) for name, kind in SAMPLE_COLUMNS.items()]
    )


def _problem_schema() -> Any:
    import pyarrow as pa

    return pa.schema([(name, pa.string()) for name in ("problem_id", "problem", "answer", "level")])
