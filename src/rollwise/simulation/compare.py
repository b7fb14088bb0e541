"""Several methods, several seeds, one distribution of prompts: figures with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwise.evaluation.curve import Hit
from rollwise.evaluation.measures import CONFIDENCE
from rollwise.ledger import OUTCOMES
from rollwise.simulation.run import SimulatedRun
from rollwise.study.aggregate import hit_ratio, mean_over_seeds, plain, restricted_mean

CURVE_POINTS = 200


def compare(
    runs: Mapping[str, Sequence[SimulatedRun]], *, baseline: str, target: float | None = None
) -> dict[str, Any]:
    """Compare methods over their seeds.

    Args:
        runs: Runs per method, of the same seeds in the same order, at least one.
        baseline: The method that the others are compared with.
        target: Mean success rate that rollouts are counted to. None: the highest that every run reached.

    Returns:
        Plain values for JSON. `methods` maps each to its figures, `Estimate`s as mappings: `rollouts_per_step`,
        `share_by_outcome` (of the generated rollouts), `zero_variance_groups` (share of the trained groups' rollouts
        and those without variance that had none), `epochs`, `steps`, `success_end`, `rollouts_to_target` (runs that
        never got there count as all they generated: `>=`), `rollouts_ratio` (the baseline's over the method's, paired
        by seed), and `share_reached`, `ended`, `stop_reasons`, `engines`, and `curve`: rollouts and the mean, lowest
        and highest success over seeds, as far as the shortest run went.
    """
    goal = target if target is not None else min(float(run.success.max()) for group in runs.values() for run in group)

    def hits(method: str) -> list[Hit]:
        found = [(run, run.rollouts_to(goal)) for run in runs[method]]
        return [Hit(float(run.rollouts_generated if n is None else n), n is not None) for run, n in found]

    def mean(values: Sequence[float]) -> dict[str, Any] | None:
        return plain(mean_over_seeds(values))

    def figures(method: str) -> dict[str, Any]:
        mine = runs[method]
        generated = [max(1, run.rollouts_generated) for run in mine]
        counts = {name: [run.outcomes[name] for run in mine] for name in OUTCOMES}
        mixed = [run.outcomes["trained"] + run.outcomes["zero_variance"] for run in mine]
        return {
            "seeds": [run.seed for run in mine],
            "engines": sorted({run.engine for run in mine}),
            "ended": [run.ended for run in mine],
            "stop_reasons": sorted({run.stop_reason for run in mine if run.stop_reason is not None}),
            "steps": mean([run.steps for run in mine]),
            "epochs": mean([run.epochs for run in mine]),
            "live_prompts": mean([run.live_prompts for run in mine]),
            "rollouts_generated": mean([run.rollouts_generated for run in mine]),
            "rollouts_per_step": mean([run.rollouts_generated / max(1, run.steps) for run in mine]),
            "share_by_outcome": {
                name: mean([count / total for count, total in zip(found, generated, strict=True)])
                for name, found in counts.items()
                if any(found)
            },
            "zero_variance_groups": mean(
                [zero / max(1, total) for zero, total in zip(counts["zero_variance"], mixed, strict=True)]
            ),
            "success_start": mean([float(run.success[0]) for run in mine]),
            "success_end": mean([float(run.success[-1]) for run in mine]),
            "share_reached": sum(hit.reached for hit in hits(method)) / len(mine),
            "rollouts_to_target": plain(restricted_mean(hits(method))),
            "rollouts_ratio": None if method == baseline else plain(hit_ratio(hits(baseline), hits(method))),
            "curve": _curve(mine),
        }

    return {
        "baseline": baseline,
        "target": goal,
        "target_is_default": target is None,
        "interval": f"{CONFIDENCE:.0%} percentile bootstrap over seeds",
        "methods": {method: figures(method) for method in runs},
    }


def _curve(runs: Sequence[SimulatedRun]) -> dict[str, list[float]]:
    """Success against rollouts, at even points, linear between steps."""
    end = min(run.rollouts_generated for run in runs)
    rollouts: NDArray[np.float64] = np.linspace(0, end, CURVE_POINTS if end else 1)
    success = np.array([np.interp(rollouts, run.rollouts, run.success) for run in runs])
    columns = {"rollouts": rollouts, "mean": success.mean(axis=0), "low": success.min(axis=0)}
    columns["high"] = success.max(axis=0)
    return {name: [round(value, 6) for value in column.tolist()] for name, column in columns.items()}
