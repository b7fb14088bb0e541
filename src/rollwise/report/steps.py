"""What happened at which step: where rollouts went, and means of logged values over the runs of an arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollwise.ledger import OUTCOMES, PENDING, TRAINED
from rollwise.report.runs import Column, RunData

_AGE_BINS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32+")
#: What is left of the outcomes where a run has no ledger yet.
_WASTED = "wasted"

#: Curves over the steps: key, title, label of the y axis.
TRAINING = (
    ("rollwise/success_rate", "Success rate", "share of fresh rollouts that succeed"),
    ("rollwise/step_rollouts_generated", "Rollouts per step", "rollouts generated in a step"),
    ("rollwise/live_prompts", "Live prompts", "prompts that may still be drawn"),
    ("rollwise/age_mean", "Age of replayed rows", "mean age of drawn rows, steps"),
    ("completions/mean_length", "Length", "mean tokens of a completion"),
    ("entropy", "Entropy", "mean entropy per token, nats"),
)
_POOL = (
    ("rollwise/live_prompts", "live prompts"),
    ("rollwise/retired_prompts", "retired prompts"),
)
_WAITING = (("rollwise/survivors_waiting", "survivors waiting"),)
_AGES = (("rollwise/age_mean", "mean age"), ("rollwise/age_max", "largest age"))


def waste(group: Sequence[RunData]) -> dict[str, Any] | None:
    """Generated rollouts per outcome and replayed rows, means over an arm's runs: of ledgers, else as logged so far."""
    told = [run for run in group if run.ledger]
    counts: dict[str, float] = {}
    replayed = 0.0
    if told:
        for run in told:
            for record in run.ledger:
                if record["kind"] == "generated":
                    counts[record["outcome"]] = counts.get(record["outcome"], 0) + record["rollouts"]
                else:
                    replayed += record["rollouts"]
        number = len(told)
    else:
        told = [run for run in group if "rollwise/rollouts_generated" in run.columns]
        for run in told:
            for outcome in (TRAINED, PENDING, _WASTED):
                counts[outcome] = counts.get(outcome, 0) + _last(run, f"rollwise/rollouts_{outcome}")
            replayed += _last(run, "rollwise/rows_replayed")
        number = len(told)
    generated = sum(counts.values())
    if not told or not generated:
        return None
    ordered = [name for name in (*OUTCOMES, _WASTED) if counts.get(name)]
    ordered += [name for name in counts if counts[name] and name not in ordered]
    return {
        "runs": number,
        "generated": generated / number,
        "replayed": replayed / number,
        "outcomes": {name: counts[name] / number for name in ordered},
    }


def _last(run: RunData, name: str) -> float:
    values = run.columns.get(name, np.array([]))
    values = values[~np.isnan(values)]
    return float(values[-1]) if len(values) else 0.0


def _waste_over_time(group: Sequence[RunData], most_bins: int) -> dict[str, Any] | None:
    """Generated rollouts per outcome by the step they were generated in, summed over an arm's runs."""
    records = [record for run in group for record in run.ledger]
    generated = [record for record in records if record["kind"] == "generated"]
    if not generated:
        return None
    edges = _edges(max(record["step"] for record in records) + 1, most_bins)
    if len(edges) < 3:
        return None
    rows: dict[str, Column] = {}
    for record in records:
        name = record["outcome"] if record["kind"] == "generated" else "replayed"
        column = int(np.searchsorted(edges, record["step"], side="right")) - 1
        rows.setdefault(name, np.zeros(len(edges) - 1))[column] += record["rollouts"]
    replayed = rows.pop("replayed", None)
    runs = sum(bool(run.ledger) for run in group)
    widths = np.diff(edges) * runs
    return {
        "edges": edges,
        "outcomes": {
            name: _rounded(rows[name] / widths, 2) for name in [*OUTCOMES, *(set(rows) - set(OUTCOMES))] if name in rows
        },
        "replayed": None if replayed is None else _rounded(replayed / widths, 2),
    }


def _edges(steps: int, most_bins: int) -> list[int]:
    """Bounds of bins of steps of nearly one width, at most `most_bins` of them."""
    bins = max(1, min(steps, most_bins))
    return [round(i * steps / bins) for i in range(bins + 1)]


def binned(group: Sequence[RunData], name: str, most_bins: int) -> dict[str, list[float]] | None:
    """Mean of a logged value over an arm's runs and over steps next to each other.

    Returns:
        `x`, the middle of the steps of a bin, and `y`; bins without a value are left out. None where there is none.
    """
    told = [run.columns for run in group if name in run.columns]
    steps = np.concatenate([columns["step"] for columns in told]) if told else np.array([])
    values = np.concatenate([columns[name] for columns in told]) if told else np.array([])
    known = ~np.isnan(values)
    steps, values = steps[known], values[known]
    if not len(steps):
        return None
    edges = np.array(_edges(int(steps.max()) + 1, most_bins))
    column = np.searchsorted(edges, steps, side="right") - 1
    count = np.bincount(column, minlength=len(edges) - 1)
    used = count > 0
    x = np.bincount(column, steps, len(edges) - 1)[used] / count[used]
    y = np.bincount(column, values, len(edges) - 1)[used] / count[used]
    return {"x": _rounded(x, 2), "y": [float(f"{value:.6g}") for value in y]}


def training(by_arm: Mapping[str, Sequence[RunData]], points: int) -> list[dict[str, Any]]:
    """Curves of `TRAINING` that some arm has more than one point of."""
    curves = []
    for name, title, label in TRAINING:
        found = {arm: curve for arm, group in by_arm.items() if (curve := binned(group, name, points))}
        if any(len(curve["x"]) > 1 for curve in found.values()):
            curves.append({"key": name, "title": title, "label": label, "arms": found})
    return curves


def details(group: Sequence[RunData], num_arms: int) -> dict[str, Any]:
    """What is drawn for one arm at a time."""
    columns = max(10, min(60, 1_200 // num_arms))
    points = max(24, min(200, 3_000 // num_arms))

    def lines(names: Sequence[tuple[str, str]]) -> dict[str, Any]:
        found = {label: curve for key, label in names if (curve := binned(group, key, points))}
        return found if any(len(curve["x"]) > 1 for curve in found.values()) else {}

    epoch = binned(group, "rollwise/epoch", points)
    pool = lines(_POOL)
    return {
        "waste": _waste_over_time(group, columns),
        "pool": pool,
        "epoch_end": epoch["y"][-1] if pool and epoch else None,
        "waiting": lines(_WAITING),
        "ess": _ess(group, columns),
        "ages": lines(_AGES),
    }


def _ess(group: Sequence[RunData], most_bins: int) -> dict[str, Any] | None:
    """Token-level effective sample size of the rows of each age, over the steps; None where nothing is old."""
    names = {age: f"rollwise/ess_token/age_{age}" for age in _AGE_BINS}
    told = [age for age, name in names.items() if any(name in run.columns for run in group)]
    if not set(told) - {"0"}:
        return None
    last = max(float(run.columns["step"][-1]) for run in group if "step" in run.columns)
    edges = _edges(int(last) + 1, most_bins)
    if len(edges) < 3:
        return None
    rows = {}
    for age in told:
        total, count = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
        for run in group:
            if names[age] not in run.columns:
                continue
            values = run.columns[names[age]]
            known = ~np.isnan(values)
            column = np.searchsorted(edges, run.columns["step"][known], side="right") - 1
            np.add.at(total, column, values[known])
            np.add.at(count, column, 1)
        rows[age] = [round(t / c, 3) if c else None for t, c in zip(total.tolist(), count.tolist(), strict=True)]
    return {"edges": edges, "rows": rows}


def _rounded(values: Column, digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]
