"""What a run logged, kept in memory and in `metrics.jsonl`, so that curves can be drawn later."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollwise.evaluation.curve import Evaluation
from rollwise.files import replacing

#: Key of the held-out accuracy in an evaluation's log: the share of completions that reach `success_threshold`.
ACCURACY = "eval_rollwise/accuracy"


class Recorder:
    """The rows a trainer logged, each with its step, the seconds so far and the rollouts generated so far.

    Args:
        path: Where the rows go, one JSON object a line, each written at once; None keeps them in memory.
        rollouts_generated: Returns the number of rollouts the run has generated so far.
        clock: Returns seconds; replaced in tests.
    """

    def __init__(
        self,
        path: Path | None,
        rollouts_generated: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.evaluations: list[Evaluation] = []
        self._path = path
        self._rollouts_generated = rollouts_generated
        self._clock = clock
        self._started = clock()
        self._seconds_before = 0.0

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of training, those before a resume included."""
        return self._seconds_before + self._clock() - self._started

    def begin(self, step: int) -> None:
        """Start, or go on, at a step: rows logged after it, by a run that was cut off, are dropped.

        A last line that was cut off in the middle of writing is dropped as well.
        """
        self._started = self._clock()
        if self._path is None:
            return
        kept = [row for row in read_rows(self._path) if row["step"] <= step] if step > 0 else []
        for row in kept:
            self._seconds_before = row["seconds"]
            self._remember(row)
        with replacing(self._path) as partial:
            partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def add(self, step: int, logs: Mapping[str, Any]) -> None:
        """Take over one logged row; numbers that are not finite become null."""
        row: dict[str, Any] = {
            "step": step,
            "seconds": round(self.seconds, 3),
            "rollouts_generated": self._rollouts_generated(),
        }
        row |= {key: _plain(value) for key, value in logs.items() if key not in row}
        self._remember(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _remember(self, row: Mapping[str, Any]) -> None:
        accuracy = row.get(ACCURACY)
        if accuracy is not None:
            self.evaluations.append(Evaluation(row["step"], row["rollouts_generated"], accuracy, row["seconds"]))


def read_evaluations(path: Path, num_iterations: int = 1) -> list[Evaluation]:
    """Read the measurements back from a `metrics.jsonl`, also while it is being written.

    Args:
        path: The file.
        num_iterations: How often the run trained on a batch, for `rows_trained`: fresh and replayed rows times this,
            as of the last step that was logged.
    """
    evaluations, rows_trained = [], 0
    for row in read_rows(path):
        if "rollwise/rollouts_trained" in row:
            batches = row["rollwise/rollouts_trained"] + row["rollwise/rows_replayed"]
            rows_trained = round(num_iterations * batches)
        if row.get(ACCURACY) is not None:
            found = row["step"], row["rollouts_generated"], row[ACCURACY], row["seconds"]
            evaluations.append(Evaluation(*found, rows_trained))
    return evaluations


def read_held_out(path: Path) -> dict[str, float]:
    """Read all figures of the last measurement on the held-out problems, such as `accuracy/<level>` or `pass@8`."""
    rows = [row for row in read_rows(path) if row.get(ACCURACY) is not None]
    prefix = ACCURACY.removesuffix("accuracy")
    return {
        name.removeprefix(prefix): value
        for name, value in (rows[-1] if rows else {}).items()
        if name.startswith(prefix) and isinstance(value, int | float)
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a `metrics.jsonl`; none where there is no file, and without a line cut off in its middle."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: numbers, texts, truth values and null."""
    if value is None or isinstance(value, bool | int | str):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None
