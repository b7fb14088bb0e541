"""How hard the prompts are: success rates from a preset, a histogram, a list, or pilots of a real run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollwise.errors import ConfigError

#: Beta(a, b) distributions by name; with the share of groups of 16 whose rewards are all equal.
PRESETS = {
    "rlvr": (0.10, 0.15),  # many hopeless, many solved, as data sets of verifiable problems are: 70%
    "hard": (0.20, 1.00),  # most are hopeless: 54%
    "flat": (1.00, 1.00),  # every rate is as likely: 12%
}

_SMALLEST, _LARGEST = 1e-3, 1e4  # of a fitted Beta's parameters: data may have no maximum between
_MOST_ITERATIONS = 10_000
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Rates:
    """A distribution of success rates over prompts. Make one with a class method; `sample` draws a pool from it.

    Attributes:
        source: What it is, in words.
        a_K: First parameter of the Beta distribution of each component, shape (K,).
        b_K: Second parameter.
        low_K: Lower end of the uniform distribution of each component; NaN where it is a Beta.
        high_K: Upper end; equal to `low_K` for a single rate.
        share_K: Share of each component; they sum to 1.
        is_pool: Whether the components are the prompts themselves, so that `sample()` knows their number.
    """

    source: str
    a_K: NDArray[np.float64]
    b_K: NDArray[np.float64]
    low_K: NDArray[np.float64]
    high_K: NDArray[np.float64]
    share_K: NDArray[np.float64]
    is_pool: bool = False

    @classmethod
    def preset(cls, name: str) -> Rates:
        """One of `PRESETS`.

        Raises:
            ConfigError: There is no such preset.
        """
        if name not in PRESETS:
            raise ConfigError(f"rates is {name!r}; name one of {', '.join(PRESETS)}, or give a file or bins")
        a, b = PRESETS[name]
        return cls._beta(f"{name}: Beta({a:g}, {b:g})", np.array([a]), np.array([b]))

    @classmethod
    def bins(cls, text: str) -> Rates:
        """A histogram written as text; see `parse_bins`."""
        low, high, share = parse_bins(text)
        return cls._uniform(f"{len(low)} bins", low, high, share)

    @classmethod
    def listed(cls, rates_P: ArrayLike) -> Rates:
        """The rates of known prompts.

        Raises:
            ConfigError: There is none, or one is outside of [0, 1].
        """
        rates = np.asarray(rates_P, dtype=np.float64)
        if rates.ndim != 1 or not len(rates) or not ((rates >= 0) & (rates <= 1)).all():
            raise ConfigError(
                f"there are {rates.size} rates from {rates.min(initial=np.inf)} to {rates.max(initial=-np.inf)}; give "
                "at least one, each in [0, 1]"
            )
        share = np.full(len(rates), 1 / len(rates))
        return cls._uniform(f"rates of {len(rates):,} prompts", rates, rates, share, is_pool=True)

    @classmethod
    def counted(cls, correct_P: ArrayLike, total_P: ArrayLike) -> Rates:
        """Prompts of which some rollouts are known: each rate is drawn from its posterior; see `estimate_rates`."""
        a, b = estimate_rates(correct_P, total_P)
        correct, total = np.asarray(correct_P, dtype=np.float64), np.asarray(total_P, dtype=np.float64)
        source = f"{len(correct):,} prompts with {total.mean():.3g} rollouts each: Beta({a:.3g}, {b:.3g})"
        return cls._beta(source, a + correct, b + total - correct, is_pool=True)

    @classmethod
    def _beta(cls, source: str, a: NDArray[np.float64], b: NDArray[np.float64], is_pool: bool = False) -> Rates:
        none = np.full(len(a), np.nan)
        return cls(source, a, b, none, none, np.full(len(a), 1 / len(a)), is_pool)

    @classmethod
    def _uniform(
        cls,
        source: str,
        low: NDArray[np.float64],
        high: NDArray[np.float64],
        share: NDArray[np.float64],
        is_pool: bool = False,
    ) -> Rates:
        ones = np.ones(len(low))
        return cls(source, ones, ones, low, high, share, is_pool)

    def sample(self, num_prompts: int | None, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw the success rates of a pool, shape (P,).

        Args:
            num_prompts: P. None: the known prompts, each once.
            rng: Source of the draws.

        Raises:
            ConfigError: P is below 1, or None where no prompts are known.
        """
        if num_prompts is None:
            if not self.is_pool:
                raise ConfigError(f"the number of prompts is missing, and {self.source} does not say; give one")
            chosen = np.arange(len(self.a_K))
        elif num_prompts < 1:
            raise ConfigError(f"the number of prompts is {num_prompts}; it must be at least 1")
        elif self.is_pool and num_prompts == len(self.a_K):
            chosen = np.arange(num_prompts)
        else:
            chosen = rng.choice(len(self.a_K), num_prompts, p=self.share_K)
        betas = rng.beta(self.a_K[chosen], self.b_K[chosen])  # Beta(1, 1) is uniform on [0, 1]
        low, high = self.low_K[chosen], self.high_K[chosen]
        return np.where(np.isnan(low), betas, low + (high - low) * betas)


def parse_bins(text: str) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Read a histogram of success rates: `RATE:WEIGHT` or `LOW-HIGH:WEIGHT`, with commas between.

    `0:0.4,0.1-0.5:0.2,1:0.4` is 40% of prompts at rate 0, a fifth anywhere from 0.1 to 0.5, and 40% at 1. Weights are
    divided by their sum.

    Returns:
        Lower ends, upper ends and shares of the bins, each of shape (K,).

    Raises:
        ConfigError: The text is none of that form, a rate is outside of [0, 1] or a weight is negative.
    """
    low, high, weight = [], [], []
    for part in text.split(","):
        try:
            ends, _, number = part.partition(":")
            first, dash, last = ends.strip().partition("-")
            low.append(float(first))
            high.append(float(last) if dash else low[-1])
            weight.append(float(number))
        except ValueError:
            raise ConfigError(f"bins: {part!r} is no bin; write RATE:WEIGHT or LOW-HIGH:WEIGHT, with commas") from None
        if not (0 <= low[-1] <= high[-1] <= 1 and 0 <= weight[-1] < np.inf):
            raise ConfigError(f"bins: {part!r} is out of bounds; rates are in [0, 1], ascending, weights 0 or more")
    if not sum(weight):
        raise ConfigError(f"bins: the weights of {text!r} sum to 0; give one of them a weight")
    return np.array(low), np.array(high), np.array(weight) / sum(weight)


def estimate_rates(correct_P: ArrayLike, total_P: ArrayLike) -> tuple[float, float]:
    """Fit the distribution of success rates to a few rollouts per prompt: p_i ~ Beta(a, b), k_i ~ Binomial(n_i, p_i).

    The shares k_i / n_i themselves are too wide a histogram: of 8 rollouts at p = 0.1, 43% show no success and look
    hopeless. The fit is the maximum of the Beta-binomial likelihood, found by its fixed point (Minka, "Estimating a
    Dirichlet distribution", 2000, eq. 55), which for whole counts needs no digamma function:

        a <- a * sum_i sum_(j < k_i) 1 / (a + j)  /  sum_i sum_(j < n_i) 1 / (a + b + j)      (b alike, with n_i - k_i)

    The rate of a prompt given its rollouts is then Beta(a + k_i, b + n_i - k_i). One Beta can be U-shaped but has no
    hump in the middle of two. Parameters are kept between 0.001 and 10,000: at their bounds all prompts are alike, or
    all are solved or hopeless.

    Args:
        correct_P: Successes k_i, shape (P,).
        total_P: Rollouts n_i, shape (P,), each at least 1 and best 4 or more: single rollouts tell the mean alone.

    Returns:
        a and b.

    Raises:
        ConfigError: The counts are not whole, do not fit each other, or there is none.
    """
    correct, total = np.asarray(correct_P), np.asarray(total_P)
    if correct.ndim != 1 or correct.shape != total.shape or not len(correct):
        raise ConfigError(f"correct has the shape {correct.shape}, total {total.shape}; give one of each per prompt")
    if (correct != np.floor(correct)).any() or (total != np.floor(total)).any():
        raise ConfigError("correct and total must be whole numbers of rollouts; for shares give a column of rates")
    if (total < 1).any() or (correct < 0).any() or (correct > total).any():
        wrong = int(np.flatnonzero((total < 1) | (correct < 0) | (correct > total))[0])
        raise ConfigError(
            f"prompt {wrong} has {correct[wrong]:g} of {total[wrong]:g} rollouts correct; total must be at least 1 and "
            "correct between 0 and it"
        )
    k, n = correct.astype(np.int64), total.astype(np.int64)
    longest = np.arange(int(n.max()))
    # Prompts with more than j successes, failures and rollouts: the inner sums over j, for all prompts at once.
    above_k, above_f, above_n = ((counts[:, None] > longest).sum(axis=0) for counts in (k, n - k, n))
    mean = float(np.clip(k.sum() / n.sum(), _SMALLEST, 1 - _SMALLEST))
    a, b = mean, 1 - mean
    for _ in range(_MOST_ITERATIONS):
        scale = (above_n / (a + b + longest)).sum()
        new_a = float(np.clip(a * (above_k / (a + longest)).sum() / scale, _SMALLEST, _LARGEST))
        new_b = float(np.clip(b * (above_f / (b + longest)).sum() / scale, _SMALLEST, _LARGEST))
        is_still = abs(new_a - a) <= _TOLERANCE * a and abs(new_b - b) <= _TOLERANCE * b
        a, b = new_a, new_b
        if is_still:
            break
    return a, b


def zero_variance_share(rates_P: ArrayLike, num_rollouts: int) -> float:
    """Expected share of groups of `num_rollouts` whose binary rewards are all equal: mean of p^G + (1 - p)^G."""
    rates = np.asarray(rates_P, dtype=np.float64)
    return float((rates**num_rollouts + (1 - rates) ** num_rollouts).mean())
