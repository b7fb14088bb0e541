"""Accuracy along rollouts, seconds and tokens: means over runs, thin enough to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollwise.evaluation.curve import Evaluation, accuracy_at
from rollwise.report.runs import RunData
from rollwise.study.aggregate import mean_over_seeds

_AXES: tuple[tuple[str, Callable[[RunData], Sequence[float] | None]], ...] = (
    ("rollouts", lambda run: [float(e.rollouts_generated) for e in run.evaluations]),
    ("seconds", lambda run: [e.seconds for e in run.evaluations]),
    ("tokens", lambda run: run.tokens),
)


def accuracy_curves(by_arm: Mapping[str, Sequence[RunData]], points: int) -> dict[str, dict[str, Any]]:
    """Mean accuracy with its interval along each axis; runs that are going only where an arm has no other."""
    curves: dict[str, dict[str, Any]] = {}
    for axis, value_of in _AXES:
        for arm, group in by_arm.items():
            ended = [run for run in group if run.evaluations and run.has_ended]
            group = ended or [run for run in group if run.evaluations]
            values = [value_of(run) for run in group]
            if not group or any(found is None or found[-1] <= 0 for found in values):
                continue
            known = [found for found in values if found is not None]
            curve = _mean_curve([run.evaluations for run in group], known, points)
            if curve["x"]:
                curves.setdefault(axis, {})[arm] = curve | {"going": not ended, "runs": len(group)}
    return curves


def _mean_curve(
    evaluations: Sequence[Sequence[Evaluation]], values: Sequence[Sequence[float]], points: int
) -> dict[str, list[float]]:
    """Mean over runs, and its interval, at points of an axis that all of them cover; linear between evaluations."""
    scale = 1000  # seconds, too, as whole numbers
    on_axis = [
        [Evaluation(e.step, round(scale * x), e.accuracy, e.seconds) for e, x in zip(run, xs, strict=True)]
        for run, xs in zip(evaluations, values, strict=True)
    ]
    low = max(run[0].rollouts_generated for run in on_axis)
    high = min(run[-1].rollouts_generated for run in on_axis)
    grid = sorted({e.rollouts_generated for run in on_axis for e in run if low <= e.rollouts_generated <= high})
    curve: dict[str, list[float]] = {"x": [], "y": [], "low": [], "high": []}
    for x in thin(grid, points):
        found = [accuracy_at(run, x) for run in on_axis]
        mean = mean_over_seeds([value for value in found if value is not None])
        if mean is None:
            continue
        curve["x"].append(x / scale)
        curve["y"].append(mean.value)
        if mean.low is not None and mean.high is not None:
            curve["low"].append(mean.low)
            curve["high"].append(mean.high)
    return curve


def thin(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values, evenly apart, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))]
