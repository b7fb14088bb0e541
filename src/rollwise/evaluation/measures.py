"""The figures of an evaluation: pass@k, avg@k, AES, rollouts to a target, lengths, and their intervals.

Numpy alone. Throughout, problem i has n_i *scored* samples, c_i of which are right. A sample that the verifier could
not score counts neither as right nor as wrong: it is left out, and its share is reported beside every figure. Intervals
are 95% percentile-bootstrap intervals over problems (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
chapter 13): they say how a figure varies over problems like these, for this model, not over training seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollwise.errors import ConfigError
from rollwise.evaluation.curve import Evaluation, first_hit

RESAMPLES = 10_000
CONFIDENCE = 0.95

_BOOTSTRAP_SEED = 0
_DRAWS_AT_ONCE = 2_000_000


@dataclass(frozen=True)
class Figure:
    """A mean over problems, or over benchmarks.

    Attributes:
        value: The mean.
        low: Lower end of its 95% interval; None with a single problem, which tells nothing about others.
        high: Upper end.
        num_problems: Problems it was computed from.
    """

    value: float
    low: float | None
    high: float | None
    num_problems: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that one of k samples or more is right, drawn without replacement from n, c of which are.

    pass@k = 1 - C(n-c, k) / C(n, k) = 1 - prod_{j=n-c+1}^{n} (1 - k/j), and 1 where n - c < k: the unbiased estimate
    of Chen et al. (arXiv 2107.03374). The product needs no large numbers.

    Args:
        n: Samples of a problem.
        c: Those that are right.
        k: Samples that a user would draw.

    Raises:
        ConfigError: Not 0 <= c <= n, or not 1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise ConfigError(f"c is {c}, but must be within 0..{n}, the number of samples n")
    if not 1 <= k <= n:
        raise ConfigError(f"k is {k}, but must be within 1..{n}, the number of samples n: draw more samples or lower k")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def mean_pass_at_k(counts: Iterable[tuple[int, int]], k: int) -> Figure | None:
    """Return the mean of pass@k over the problems that have at least k scored samples; None where there is none.

    Args:
        counts: (n_i, c_i) of each problem.
        k: As for `pass_at_k`.
    """
    return mean_over_problems([pass_at_k(n, c, k) for n, c in counts if n >= k])


def avg_at_k(counts: Iterable[tuple[int, int]]) -> Figure | None:
    """Return avg@k = (1 / P) sum_i c_i / n_i over the P problems with a scored sample; None where there is none.

    k is the number of samples drawn for each problem. It equals pass@1; the name says how many samples it rests on.

    Args:
        counts: (n_i, c_i) of each problem.
    """
    return mean_over_problems([c / n for n, c in counts if n > 0])


def mean_over_problems(values: Sequence[float]) -> Figure | None:
    """Return the mean of one value per problem and its interval; None without values."""
    if not len(values):
        return None
    return _figure(float(np.mean(values)), _resampled_means(values) if len(values) > 1 else None, len(values))


def mean_over_benchmarks(values_by_benchmark: Sequence[Sequence[float]]) -> Figure | None:
    """Return the unweighted mean over benchmarks, (1 / B) sum_b mean_i x_bi: a small benchmark counts like a large one.

    The problems of each benchmark are resampled on their own.

    Args:
        values_by_benchmark: One value per problem, for each benchmark.

    Returns:
        None where a benchmark has no values: a mean over the others would be another figure.
    """
    if not values_by_benchmark or not all(len(values) for values in values_by_benchmark):
        return None
    value = float(np.mean([np.mean(values) for values in values_by_benchmark]))
    count = sum(len(values) for values in values_by_benchmark)
    if count == len(values_by_benchmark):
        return Figure(value, None, None, count)
    means = [_resampled_means(values, seed) for seed, values in enumerate(values_by_benchmark)]
    return _figure(value, np.mean(means, axis=0), count)


def _figure(value: float, resampled: npt.NDArray[np.float64] | None, count: int) -> Figure:
    if resampled is None:
        return Figure(value, None, None, count)
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Figure(value, float(low), float(high), count)


def _resampled_means(values: Sequence[float], seed: int = _BOOTSTRAP_SEED) -> npt.NDArray[np.float64]:
    """Return the means of `RESAMPLES` resamples, drawn in pieces so that many problems need no more memory."""
    known = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    piece = max(1, _DRAWS_AT_ONCE // len(known))
    sizes = [min(piece, RESAMPLES - start) for start in range(0, RESAMPLES, piece)]
    return np.concatenate([known[rng.integers(len(known), size=(size, len(known)))].mean(axis=1) for size in sizes])


def rollouts_to_target(evaluations: Sequence[Evaluation], target: float) -> float | None:
    """Return the generated rollouts up to the first evaluation at or above the target; None if there is none.

    One run's figure. Over seeds use `rollwise.study.aggregate`, which has the restricted mean and the intervals.
    """
    hit = first_hit(evaluations, target, "rollouts_generated") if evaluations else None
    return hit.value if hit is not None and hit.reached else None


def mean_lengths(tokens: Sequence[int], is_right: Sequence[bool | None]) -> dict[str, float | None]:
    """Return the mean tokens of all samples, of the right ones and of the wrong ones; None where there are none.

    The mean is over samples, not over problems; unscored samples count under `all` only.

    Args:
        tokens: Generated tokens of each sample.
        is_right: True, False, or None for an unscored one.
    """
    lengths = np.asarray(tokens, np.float64)
    chosen = {
        "all": np.ones(len(lengths), bool),
        "right": np.array([verdict is True for verdict in is_right], bool),
        "wrong": np.array([verdict is False for verdict in is_right], bool),
    }
    return {name: float(lengths[mask].mean()) if mask.any() else None for name, mask in chosen.items()}
