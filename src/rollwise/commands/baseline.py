"""How many rollouts plain GRPO needs for the accuracy that a run reached.

Both runs are read the same way: the first evaluation at or above the target counts, with all rollouts generated
before it. Nothing is interpolated, and a run that never gets there is said to have never got there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollwise.evaluation.curve import Evaluation, first_at_or_above

#: The settings that make a run plain GRPO.
PLAIN_GRPO = {
    "allocation": "uniform",
    "allocation_kwargs": "{}",
    "replay_ratio": 0,
    "replay_updates_per_fresh": 0,
    "drop_zero_variance": False,
}


def step_budget(num_rollouts: int, rollouts_per_step: float) -> int:
    """Return the optimizer steps of plain GRPO that generate `num_rollouts`, rounded up, at least 1."""
    return max(1, math.ceil(num_rollouts / rollouts_per_step))


@dataclass(frozen=True)
class Comparison:
    """A run beside plain GRPO with the same model, data, seed and batch.

    Attributes:
        target: Held-out accuracy that both are measured by: the run's last one.
        run: The run's first evaluation at or above it.
        baseline: Plain GRPO's first evaluation at or above it; None where it never got there.
        baseline_rollouts: All rollouts that plain GRPO was given.
        baseline_best: Its best held-out accuracy.
        ended_by: Why it ended: `target`, `rollouts` or `time`.
    """

    target: float
    run: Evaluation
    baseline: Evaluation | None
    baseline_rollouts: int
    baseline_best: float
    ended_by: str

    @property
    def ratio(self) -> float | None:
        """Plain GRPO's rollouts to the target, as a multiple of the run's; None where it never got there."""
        if self.baseline is None or self.run.rollouts_generated == 0:
            return None
        return self.baseline.rollouts_generated / self.run.rollouts_generated

    def sentence(self) -> str:
        """Say what came out, in one sentence."""
        rollouts = self.run.rollouts_generated
        mine = f"This run reached a held-out accuracy of {self.target:.3f} after {rollouts:,} rollouts"
        if self.baseline is None:
            why = " (its time was over)" if self.ended_by == "time" else ""
            return (
                f"{mine}; plain GRPO did not reach it within {self.baseline_rollouts:,}{why}: "
                f"its best was {self.baseline_best:.3f}."
            )
        theirs = f"plain GRPO after {self.baseline.rollouts_generated:,}"
        ratio = self.ratio
        if ratio is None or abs(ratio - 1) < 0.05:
            verdict = "about as many"
        elif ratio > 1:
            verdict = f"{ratio:.1f} times as many"
        else:
            verdict = f"this run needed {1 / ratio:.1f} times as many"
        return f"{mine}, {theirs}: {verdict}."

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for `summary.json`."""
        return {**asdict(self), "ratio": self.ratio, "sentence": self.sentence()}


def compare(run: Sequence[Evaluation], baseline: Sequence[Evaluation], *, rollouts: int, ended_by: str) -> Comparison:
    """Compare two runs by the rollouts each needed for the first one's last accuracy.

    Args:
        run: Evaluations of the run, at least one.
        baseline: Evaluations of plain GRPO, at least one.
        rollouts: All rollouts that plain GRPO generated.
        ended_by: `rollouts` or `time`: what ended plain GRPO if the target did not.
    """
    target = run[-1].accuracy
    mine = first_at_or_above(run, target)
    theirs = first_at_or_above(baseline, target)
    return Comparison(
        target=target,
        run=mine or run[-1],
        baseline=theirs,
        baseline_rollouts=rollouts,
        baseline_best=max(evaluation.accuracy for evaluation in baseline),
        ended_by="target" if theirs else ended_by,
    )
