"""What a run leaves behind: `summary.json`."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

from rollwise._version import __version__
from rollwise.evaluation.curve import Evaluation
from rollwise.files import replacing

SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
LEDGER = "ledger.parquet"

_LIBRARIES = ("trl", "transformers", "torch", "accelerate", "datasets")
_SECRET_NAME = re.compile(r"(^|_)(token|key|secret|password|passwd|credentials?)$", re.IGNORECASE)
_SECRET_TEXT = re.compile(r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|(?<=://)[^/@\s]+(?=@)")
_REMOVED = "(removed)"


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a setting as JSON can hold it, with tokens, keys and passwords taken out, however deep they sit."""
    if value is not None and _SECRET_NAME.search(name):
        return _REMOVED
    if isinstance(value, Mapping):
        return {str(key): without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [without_secrets(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(json.JSONDecodeError):
            return without_secrets(json.loads(value))
    return _SECRET_TEXT.sub(_REMOVED, str(value))


def versions() -> dict[str, str]:
    """Return the versions of Python, Rollwise and the libraries that a result depends on."""
    found = {"python": platform.python_version(), "rollwise": __version__}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader sees either the whole old or the whole new one, whatever happens."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, allow_nan=False)
        file.write("\n")


def start_summary(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the summary of a run that begins: what it is, before anything is known about how it goes."""
    return {
        "status": "running",
        "seed": seed,
        "settings": without_secrets(settings),
        "versions": versions(),
    }


def finish_summary(
    start: Mapping[str, Any],
    *,
    status: str,
    stop_reason: str | None,
    steps: int,
    seconds: float,
    seconds_generation: float,
    seconds_rollwise: float,
    totals: Mapping[str, int],
    evaluations: Sequence[Evaluation],
) -> dict[str, Any]:
    """Return the summary of a run that has ended.

    Args:
        start: What `start_summary` returned.
        status: `finished`, `stopped` (by Rollwise, for `stop_reason`) or `interrupted` (Ctrl-C).
        stop_reason: Why the run ended before its last step; None where it did not.
        steps: Optimizer steps done.
        seconds: Wall-clock seconds of training and evaluation, without loading.
        seconds_generation: Seconds of these that generated training rollouts.
        seconds_rollwise: Seconds of these that Rollwise itself took.
        totals: The ledger's totals.
        evaluations: All measurements on the held-out problems, in order; none where nothing was measured.
    """
    return {
        "status": status,
        "stop_reason": stop_reason,
        "heldout_accuracy_start": evaluations[0].accuracy if evaluations and evaluations[0].step == 0 else None,
        "heldout_accuracy_end": evaluations[-1].accuracy if evaluations else None,
        "heldout_accuracy_best": max((e.accuracy for e in evaluations), default=None),
        **{key: int(value) for key, value in totals.items()},
        "steps": steps,
        "seconds": round(seconds, 3),
        "seconds_generation": round(seconds_generation, 3),
        "seconds_rollwise": round(seconds_rollwise, 3),
        **{key: value for key, value in start.items() if key != "status"},
    }
