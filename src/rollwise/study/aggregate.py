"""From runs to figures: means over seeds with bootstrap intervals, paired comparisons, rollouts to a target.

Numpy alone. Throughout, S is a number of seeds, accuracies are shares in [0, 1], and budgets count generated training
rollouts. Intervals are 95% percentile-bootstrap intervals over seeds (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 13): of 10,000 resamples of S seeds with replacement, the 2.5th and 97.5th percentiles of
the statistic. They say how the figure varies over seeds, not over workloads, and with five seeds or so they are
narrower than their name: such an interval of a mean covers it in 80 to 90% of studies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollwise.evaluation.curve import Axis, Evaluation, Hit, accuracy_at, first_hit
from rollwise.evaluation.efficiency import aes
from rollwise.evaluation.measures import CONFIDENCE, RESAMPLES

_BOOTSTRAP_SEED = 0
_DEFAULT_BUDGETS = 4


@dataclass(frozen=True)
class FinishedRun:
    """What one run measured.

    Attributes:
        arm: The run's arm.
        seed: Its seed.
        evaluations: Its measurements on the held-out problems, in order, at least one.
        totals: Totals of the whole run: the ledger's counts, steps and seconds.
        held_out: All figures of its last evaluation, by their names in the log without `eval_rollwise/`.
    """

    arm: str
    seed: int
    evaluations: Sequence[Evaluation]
    totals: Mapping[str, float]
    held_out: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """A statistic over seeds.

    Attributes:
        value: The statistic.
        low: Lower end of its interval; None with a single seed, which tells nothing about others.
        high: Upper end.
        num_seeds: Seeds it was computed from.
        bound: `=`, or `>=` / `<=` where runs that never reached the target count as their budget, so that the true
            value can only be larger / smaller; `?` where it can be either.
    """

    value: float
    low: float | None
    high: float | None
    num_seeds: int
    bound: str = "="


def mean_over_seeds(values: Sequence[float], bound: str = "=") -> Estimate | None:
    """Return the mean of one value per seed and its interval; None without values.

    mean = (1 / S) sum_s x_s, resampled as (1 / S) sum_j x_(i_j) with i_j uniform on the S seeds.
    """
    return ratio_of_means(values, np.ones(len(values)), bound)


def ratio_of_means(
    numerators: Sequence[float] | npt.NDArray[np.float64],
    denominators: Sequence[float] | npt.NDArray[np.float64],
    bound: str = "=",
) -> Estimate | None:
    """Return the ratio of two means over the same seeds, and its interval; seeds stay paired in every resample.

    ratio = sum_s n_s / sum_s d_s, resampled as sum_j n_(i_j) / sum_j d_(i_j): both runs of a seed are drawn together.

    Args:
        numerators: (S,) values.
        denominators: (S,) values of the same seeds in the same order.
        bound: Passed on to the estimate.

    Returns:
        None without values, or where a denominator is not above 0.
    """
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    num_seeds = len(above)
    if num_seeds == 0 or (below <= 0).any():
        return None
    value = float(above.sum() / below.sum())
    if num_seeds == 1:
        return Estimate(value, None, None, 1, bound)
    drawn = np.random.default_rng(_BOOTSTRAP_SEED).integers(num_seeds, size=(RESAMPLES, num_seeds))
    resampled = above[drawn].sum(axis=1) / below[drawn].sum(axis=1)
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high), num_seeds, bound)


def restricted_mean(hits: Sequence[Hit]) -> Estimate | None:
    """Return the mean over seeds in which runs that never reached the target count as their budget.

    A lower bound, marked `>=`, as soon as one of them did not (restricted mean survival time: Royston and Parmar, BMC
    Medical Research Methodology 13:152, 2013; here each run is restricted by its own budget).
    """
    return mean_over_seeds([hit.value for hit in hits], "=" if all(hit.reached for hit in hits) else ">=")


def hit_ratio(baseline: Sequence[Hit], arm: Sequence[Hit]) -> Estimate | None:
    """Return the baseline's restricted mean over the arm's, of the same seeds in the same order.

    Above 1 the arm needs less. Censored baseline runs make it a lower bound, censored runs of the arm an upper bound.
    """
    missed = (not all(hit.reached for hit in baseline), not all(hit.reached for hit in arm))
    bound = {(False, False): "=", (True, False): ">=", (False, True): "<=", (True, True): "?"}[missed]
    return ratio_of_means([hit.value for hit in baseline], [hit.value for hit in arm], bound)


def peak_mean(runs: Sequence[FinishedRun]) -> float:
    """Return the largest mean accuracy of an arm: max over the steps t that all its runs evaluated of mean_s a_s(t)."""
    curves = [{evaluation.step: evaluation.accuracy for evaluation in run.evaluations} for run in runs]
    shared = set.intersection(*map(set, curves))
    return max((float(np.mean([curve[step] for curve in curves])) for step in shared), default=0.0)


def default_target(arms: Mapping[str, Sequence[FinishedRun]]) -> float:
    """Return the smallest of the arms' peak mean accuracies: the highest that every arm reaches in the mean."""
    return min(peak_mean(runs) for runs in arms.values())


def default_budgets(runs: Sequence[FinishedRun], axis: Axis = "rollouts_generated") -> list[int]:
    """Return four even points up to the number of rollouts that every run generated before its last evaluation."""
    total = int(min(getattr(run.evaluations[-1], axis) for run in runs))
    points = (total * (i + 1) // _DEFAULT_BUDGETS for i in range(_DEFAULT_BUDGETS))
    return sorted({point for point in points if point > 0})


def aggregate(
    runs: Sequence[FinishedRun],
    *,
    arms: Sequence[str],
    baseline: str,
    target: float | None = None,
    budget_rollouts: Sequence[int] | None = None,
    interpolated: bool = False,
) -> dict[str, Any]:
    """Compare the arms over their seeds.

    Args:
        runs: Finished runs, at least one; arms may have different seeds, then only shared ones are paired.
        arms: Names of the arms in the order of the result; those without a run are left out.
        baseline: The arm that the others are compared with.
        target: Accuracy that rollouts and seconds are counted to; None takes `default_target`.
        budget_rollouts: Where accuracies are compared; None takes `default_budgets`.
        interpolated: Passed to `first_hit`.

    Returns:
        Plain values for JSON. `arms` maps each arm to its `seeds`, `peak_mean`, `accuracy` and `accuracy_difference`
        (arm minus baseline, paired by seed) at each of `budget_rollouts`, the same at each of `rows_trained` (equal
        training compute: rows that gradient steps took), `rollouts_to_target`, `seconds_to_target`,
        `share_reached`, `rollouts_ratio` and `seconds_ratio` (baseline over arm, paired), `share_trained` (of the
        generated rollouts, those that reached a gradient), `rows_replayed` and `seconds` (training and evaluation,
        without loading), and from the last evaluations `held_out` (its figures by name), `held_out_difference` (arm
        minus baseline, paired) and `aes` (`rollwise.evaluation.efficiency.aes` of each run against the baseline's run
        of its seed). Figures are `Estimate`s as mappings, or None.
    """
    by_arm = {arm: sorted((r for r in runs if r.arm == arm), key=lambda r: r.seed) for arm in arms}
    by_arm = {arm: found for arm, found in by_arm.items() if found}
    goal = default_target(by_arm) if target is None else target
    budgets = list(budget_rollouts) if budget_rollouts is not None else default_budgets(runs)
    row_budgets = default_budgets(runs, "rows_trained")  # none where it is not known

    def compared(arm: str) -> dict[str, Any]:
        mine = by_arm[arm]
        others = {run.seed: run for run in by_arm.get(baseline, ())}
        pairs = [(others[run.seed], run) for run in mine if run.seed in others] if arm != baseline else []

        def hits(group: Sequence[FinishedRun], axis: Axis) -> list[Hit]:
            return [first_hit(run.evaluations, goal, axis, interpolated=interpolated) for run in group]

        def ratio(axis: Axis) -> Estimate | None:
            return hit_ratio(hits([b for b, _ in pairs], axis), hits([m for _, m in pairs], axis))

        def difference(budget: float, axis: Axis) -> dict[str, Any] | None:
            both = [
                (accuracy_at(b.evaluations, budget, axis), accuracy_at(m.evaluations, budget, axis)) for b, m in pairs
            ]
            return plain(mean_over_seeds([m - b for b, m in both if b is not None and m is not None]))

        def accuracy(budget: float, axis: Axis) -> dict[str, Any] | None:
            found = [accuracy_at(run.evaluations, budget, axis) for run in mine]
            return plain(mean_over_seeds([value for value in found if value is not None]))

        def mean_total(name: str) -> Estimate | None:
            return mean_over_seeds([run.totals[name] for run in mine])

        def mean_aes() -> Estimate | None:
            both = [(m.held_out, b.held_out) for b, m in pairs if "tokens" in m.held_out and "tokens" in b.held_out]
            scores = [aes(m["tokens"], m["accuracy"], b["tokens"], b["accuracy"]).value for m, b in both]
            return mean_over_seeds([score for score in scores if score is not None])

        names = sorted({name for run in mine for name in run.held_out})
        held_out = {name: mean_over_seeds([r.held_out[name] for r in mine if name in r.held_out]) for name in names}
        held_out_difference = {
            name: mean_over_seeds(
                [m.held_out[name] - b.held_out[name] for b, m in pairs if name in m.held_out and name in b.held_out]
            )
            for name in names
        }
        reached = [hit.reached for hit in hits(mine, "rollouts_generated")]
        generated = [run.totals["rollouts_generated"] for run in mine]
        figures = {
            "rollouts_to_target": restricted_mean(hits(mine, "rollouts_generated")),
            "seconds_to_target": restricted_mean(hits(mine, "seconds")),
            "rollouts_ratio": ratio("rollouts_generated"),
            "seconds_ratio": ratio("seconds"),
            "share_trained": ratio_of_means([run.totals["rollouts_trained"] for run in mine], generated),
            "rows_replayed": mean_total("rows_replayed"),
            "rollouts_generated": mean_total("rollouts_generated"),
            "seconds": mean_total("seconds"),
            "aes": mean_aes(),
        }
        return {
            "seeds": [run.seed for run in mine],
            "peak_mean": peak_mean(mine),
            "share_reached": sum(reached) / len(reached),
            "accuracy": [accuracy(budget, "rollouts_generated") for budget in budgets],
            "accuracy_difference": [difference(budget, "rollouts_generated") for budget in budgets],
            "accuracy_at_rows_trained": [accuracy(rows, "rows_trained") for rows in row_budgets],
            "difference_at_rows_trained": [difference(rows, "rows_trained") for rows in row_budgets],
            **{name: plain(estimate) for name, estimate in figures.items()},
            "held_out": {name: plain(estimate) for name, estimate in held_out.items()},
            "held_out_difference": {name: plain(estimate) for name, estimate in held_out_difference.items()},
        }

    return {
        "baseline": baseline,
        "target": goal,
        "target_is_default": target is None,
        "to_target": "interpolated" if interpolated else "first evaluation at or above",
        "budget_rollouts": budgets,
        "rows_trained": row_budgets,
        "interval": f"{CONFIDENCE:.0%} percentile bootstrap over seeds, {RESAMPLES:,} resamples",
        "arms": {arm: compared(arm) for arm in by_arm},
    }


def plain(estimate: Estimate | None) -> dict[str, Any] | None:
    """Return an estimate as JSON holds it."""
    return None if estimate is None else asdict(estimate)
