"""Held-out accuracy over a run: what was measured when, and where the curve reaches a target. Numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Axis = Literal["rollouts_generated", "rows_trained", "seconds"]


@dataclass(frozen=True)
class Evaluation:
    """One measurement on the held-out problems.

    Attributes:
        step: Optimizer steps done before it.
        rollouts_generated: Training rollouts generated before it (those of evaluations do not count).
        accuracy: Share of held-out completions that succeed, in [0, 1].
        seconds: Wall-clock seconds since training began.
        rows_trained: Rows that the gradient steps before it have taken, each as often as it was taken; 0: not known.
    """

    step: int
    rollouts_generated: int
    accuracy: float
    seconds: float
    rows_trained: int = 0


@dataclass(frozen=True)
class Hit:
    """Where a run first reached a target: `value` on some axis, or its whole budget if `reached` is False."""

    value: float
    reached: bool


def first_at_or_above(evaluations: Sequence[Evaluation], target: float) -> Evaluation | None:
    """Return the first evaluation whose accuracy reaches the target, or None."""
    return next((evaluation for evaluation in evaluations if evaluation.accuracy >= target), None)


def accuracy_at(evaluations: Sequence[Evaluation], budget: float, axis: Axis = "rollouts_generated") -> float | None:
    """Return the accuracy once `budget` rollouts were generated, linear between the evaluations around it.

    a(B) = a_k + (a_(k+1) - a_k) (B - n_k) / (n_(k+1) - n_k) for n_k <= B < n_(k+1), with n in generated rollouts, or
    in what else `axis` names. Of several evaluations at the same n the last counts. Nothing is extrapolated: None
    before the first evaluation and beyond the last.
    """
    points = {getattr(evaluation, axis): evaluation.accuracy for evaluation in evaluations}
    if not points or not min(points) <= budget <= max(points):
        return None
    rollouts = sorted(points)
    return float(np.interp(budget, rollouts, [points[n] for n in rollouts]))


def first_hit(evaluations: Sequence[Evaluation], target: float, axis: Axis, *, interpolated: bool = False) -> Hit:
    """Return how many rollouts or seconds a run took to a target accuracy.

    By default the first evaluation at or above the target counts, as it was measured: it lies up to one evaluation
    interval late. Interpolated, the line from the evaluation before it, which is below the target, is followed to the
    target: x = x_(k-1) + (x_k - x_(k-1)) (target - a_(k-1)) / (a_k - a_(k-1)).

    A run that never reached it has the value of its last evaluation, its budget, and `reached` False.
    """
    hit = first_at_or_above(evaluations, target)
    if hit is None:
        return Hit(float(getattr(evaluations[-1], axis)), reached=False)
    end = float(getattr(hit, axis))
    index = list(evaluations).index(hit)
    if not interpolated or index == 0:
        return Hit(end, reached=True)
    before = evaluations[index - 1]
    start = float(getattr(before, axis))
    return Hit(start + (end - start) * (target - before.accuracy) / (hit.accuracy - before.accuracy), reached=True)
