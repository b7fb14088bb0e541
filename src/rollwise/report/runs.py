"""The runs that lie in a run's or a study's folder, each reduced to what a report shows.

A run that is still going has neither totals nor a ledger yet; its `metrics.jsonl` and its recipe say how far it is.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollwise.evaluation.curve import Evaluation
from rollwise.records.metrics import ACCURACY, read_rows
from rollwise.records.summary import LEDGER, METRICS, SUMMARY
from rollwise.study.run import DONE, LOCK, RECIPE, RUN
from rollwise.usage import UsageError

#: `rollwise train --baseline` leaves plain GRPO's run here.
BASELINE = "baseline"
_WORKING = "train"  # a study's run that goes on works here
_TOTALS = ("rollouts_generated", "rollouts_trained", "rows_replayed", "seconds")
_ENDED = ("finished", "stopped", "interrupted")
#: Settings that name a run and are no part of its method.
NOT_A_METHOD = ("seed", "output_dir", "run_name", "logging_dir", "overwrite", "resume_from_checkpoint", "env")
_COLUMNS = re.compile(
    r"(rollwise/(success_rate|tokens_generated|step_rollouts_generated|step_rows_fresh|step_rows_replayed|live_prompts"
    r"|retired_prompts|survivors_waiting|epoch|prompts_seen|age_mean|age_max|buffer_rollouts|ess_token/age_.+"
    r"|rollouts_(generated|trained|pending|wasted)|rows_replayed)"
    r"|reward|entropy|frac_reward_zero_std|completions/mean_length)"
)

Column = npt.NDArray[np.float64]


@dataclass
class RunData:
    """One run.

    Attributes:
        folder: Where its files are.
        name: How the page calls it.
        arm: Name of the method it is a run of; runs of one arm differ in their seed.
        seed: Its seed, if known.
        status: `running`, or what its summary says: `finished`, `stopped`, `interrupted`, `failed`.
        stop_reason: Why it ended early.
        settings: Its settings, without secrets.
        totals: Totals of the whole run; empty while it is going.
        evaluations: Its measurements on held-out problems, in order.
        tokens: Tokens generated before each of them; None where they were not logged.
        columns: Logged values of the training steps, NaN where a step has none; `step`, `seconds` and
            `rollouts_generated` among them.
        ledger: Records of its ledger; none while it is going.
        idle_seconds: Seconds since it last logged anything.
        comparison: What `rollwise train --baseline` found.
        about: Versions and commit it was made with.
    """

    folder: Path
    name: str
    arm: str
    seed: int | None
    status: str
    stop_reason: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, float] = field(default_factory=dict)
    evaluations: Sequence[Evaluation] = ()
    tokens: Sequence[float] | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    ledger: Sequence[Mapping[str, Any]] = ()
    idle_seconds: float | None = None
    comparison: Mapping[str, Any] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether it came to an end that its totals belong to."""
        return self.status in _ENDED and all(name in self.totals for name in _TOTALS)


@dataclass
class Source:
    """A folder that was named: its runs, and what a study's summary says of how to compare them."""

    path: Path
    kind: str
    runs: list[RunData]
    summary: Mapping[str, Any] = field(default_factory=dict)


def read_source(path: Path) -> Source:
    """Read all runs of a run's or a study's folder.

    Raises:
        UsageError: It is neither, or nothing was measured there yet.
    """
    if not path.exists():
        raise UsageError(f"no folder {str(path)!r}; name that of a `rollwise train` run or of a `rollwise study`")
    if not path.is_dir():
        raise UsageError(f"{str(path)!r} is a file; name the folder of a run or of a study that holds it")
    if _is_run(path):
        return Source(path, "run", _runs_of_training(path))
    found = sorted(path.glob(f"*/seed-*/{RUN}"), key=_started) or sorted(path.glob(f"seed-*/{RUN}"), key=_started)
    if found:
        runs = [_study_run(file.parent, f"{file.parent.parent.name}/{file.parent.name}") for file in found]
        return Source(path, "study", runs, _read_json(path / SUMMARY))
    if (path / LOCK).exists():
        raise UsageError(f"{str(path)!r} is a study's folder without a run yet: wait until its first run has started")
    inside = sorted(str(child) for child in path.iterdir() if child.is_dir() and (_is_run(child) or _is_study(child)))
    if inside:
        named = " ".join(inside[:3]) + (" ..." if len(inside) > 3 else "")
        raise UsageError(
            f"{str(path)!r} is no run or study itself, but {len(inside)} lie in it: name them, rollwise report {named}"
        )
    raise UsageError(
        f"{str(path)!r} holds neither a run ({SUMMARY}, {METRICS}) nor a study (<arm>/seed-<n>/{RUN}): name a folder "
        "that `rollwise train` or `rollwise study` wrote"
    )


def _is_run(path: Path) -> bool:
    if (path / RUN).is_file() or (path / METRICS).is_file():
        return True
    return "settings" in _read_json(path / SUMMARY)


def _is_study(path: Path) -> bool:
    return (path / LOCK).exists() or any(path.glob(f"*/seed-*/{RUN}"))


def _started(file: Path) -> tuple[float, str]:
    return file.stat().st_mtime, str(file)


def _runs_of_training(path: Path) -> list[RunData]:
    if (path / RUN).is_file():
        about = _read_json(path / RUN)
        arm = str(about.get("arm", path.parent.name))
        return [_study_run(path, f"{arm}/{path.name}")]
    name = path.resolve().name
    runs = [_read_run(path, name, name)]
    if _is_run(path / BASELINE):
        runs.append(_read_run(path / BASELINE, f"{name}/{BASELINE}", f"{name}: plain GRPO"))
    return runs


def _study_run(folder: Path, name: str) -> RunData:
    about = _read_json(folder / RUN)
    is_done = (folder / DONE).is_file()
    where = folder if is_done or not (folder / _WORKING).is_dir() else folder / _WORKING
    run = _read_run(where, name, str(about.get("arm", folder.parent.name)), recipe=folder / RECIPE)
    if isinstance(about.get("seed"), int):
        run.seed = about["seed"]
    if not is_done and run.status in _ENDED and run.status != "interrupted":
        run.status = "running"  # its files are about to be put in their place
    run.about = about
    return run


def _read_run(folder: Path, name: str, arm: str, recipe: Path | None = None) -> RunData:
    summary = _read_json(folder / SUMMARY)
    settings = dict(summary.get("settings") or {})
    if recipe is not None and recipe.is_file():
        import yaml  # type: ignore[import-untyped, unused-ignore]

        settings = dict(yaml.safe_load(recipe.read_text(encoding="utf-8")) or {}) | settings
    evaluations, tokens, columns = _read_metrics(folder / METRICS)
    totals = {key: value for key, value in summary.items() if _is_number(value) and key != "seed"}
    seed = summary.get("seed", settings.get("seed"))
    files = [file for file in (folder / METRICS, folder / SUMMARY) if file.is_file()]
    return RunData(
        folder=folder,
        name=name,
        arm=arm,
        seed=seed if isinstance(seed, int) else None,
        status=str(summary.get("status", "running")),
        stop_reason=summary.get("stop_reason"),
        settings=settings,
        totals=totals,
        evaluations=evaluations,
        tokens=tokens,
        columns=columns,
        ledger=_read_ledger(folder / LEDGER),
        idle_seconds=max(0.0, time.time() - max(os.stat(file).st_mtime for file in files)) if files else None,
        comparison=summary.get("baseline") if isinstance(summary.get("baseline"), dict) else None,
        about={"versions": summary.get("versions", {})},
    )


def _read_metrics(path: Path) -> tuple[list[Evaluation], list[float] | None, dict[str, Column]]:
    """Reduce the logged rows to evaluations and to columns of the training steps: the rows alone would fill memory."""
    evaluations: list[Evaluation] = []
    tokens_at: list[float] = []
    tokens = 0.0
    kept: list[dict[str, float]] = []
    names: dict[str, None] = {}
    for row in read_rows(path):
        if not (isinstance(row, dict) and {"step", "seconds", "rollouts_generated"} <= row.keys()):
            continue
        if row.get(ACCURACY) is not None:
            evaluations.append(Evaluation(row["step"], row["rollouts_generated"], row[ACCURACY], row["seconds"]))
            tokens_at.append(tokens)
        found = {name: float(value) for name, value in row.items() if _is_number(value) and _COLUMNS.fullmatch(name)}
        if found:
            tokens = found.get("rollwise/tokens_generated", tokens)
            kept.append(found | {key: float(row[key]) for key in ("step", "seconds", "rollouts_generated")})
            names |= dict.fromkeys(kept[-1])
    columns = {name: np.array([row.get(name, np.nan) for row in kept], np.float64) for name in names}
    return evaluations, tokens_at if "rollwise/tokens_generated" in columns else None, columns


def _read_ledger(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    import pyarrow.parquet as pq

    records: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return records


def _read_json(path: Path) -> dict[str, Any]:
    """Read a mapping; empty where there is none, or none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
