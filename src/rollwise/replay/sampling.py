"""Drawing without replacement from weights that are given as logarithms."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SMALLEST = np.finfo(np.float64).tiny  # the generator may return 0, whose logarithm is no number


def draw_without_replacement(
    log_weights_N: NDArray[np.float64], num_draws: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw distinct positions, one after the other, each with probability proportional to what is left.

        P(i_1, ..., i_k) = prod_j  w_{i_j} / (W - w_{i_1} - ... - w_{i_{j-1}}),   w = exp(log_weights_N)

    The k largest of `log_weights_N` plus independent standard Gumbel noise have exactly this distribution
    (Gumbel top-k). Minus the logarithm of an exponential variable is such noise, and faster to make. Only differences
    of log weights matter, so no weight overflows or underflows.

    Args:
        log_weights_N: Log weights, shape (N,); -inf is never drawn.
        num_draws: How many to draw. Fewer are returned if fewer have a positive weight.
        rng: Source of the noise; N numbers are taken from it.

    Returns:
        Distinct positions in the order drawn, shape (min(num_draws, number of positive weights),).

    Source: Kool et al., "Stochastic Beams and Where to Find Them", ICML 2019, section 2.3.
    """
    exponential_N = np.maximum(rng.standard_exponential(len(log_weights_N)), _SMALLEST)
    arrival_N = np.log(exponential_N) - log_weights_N  # weight 0 arrives at +inf
    num_draws = min(num_draws, int(np.count_nonzero(arrival_N < np.inf)))
    if num_draws <= 0:
        return np.zeros(0, dtype=np.int64)
    first = np.argpartition(arrival_N, num_draws - 1)[:num_draws]
    return first[np.argsort(arrival_N[first], kind="stable")]
