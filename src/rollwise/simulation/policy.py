"""A policy without a model: every prompt has a success rate, and training raises all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollwise.errors import ConfigError

_MEASURED = 4096  # prompts, evenly spaced in difficulty, that stand for the pool


class SimulatedPolicy:
    """Answers with Bernoulli rewards and learns from the groups it is trained on.

    With p_i the success rate that prompt i starts with and m_g the share of successes in a trained group g,

        p_i(t) = sigmoid(skill_t - difficulty_i),   difficulty_i = -logit(p_i),   skill_0 = 0
        skill_(t+1) = (1 - forgetting) * skill_t + gain_per_group * S_t / (1 + S_t / critical_groups)
        S_t = sum_g 2 sqrt(m_g (1 - m_g))

    A group of m_g = 1/2 counts 1 and a group without variance 0: the size of the gradient of a group of normalised
    advantages goes with sqrt(p (1 - p)) ("Spend Your Rollouts Where It Counts", arXiv 2605.26606, Prop. 3.1). Without
    `critical_groups` a step gains in proportion to its groups; with it further groups gain less, as larger batches do
    ("An Empirical Model of Large-Batch Training", arXiv 1812.06162, eq. 2.7), and an optimizer that normalises its
    steps, such as Adam, is closer to that.

    What this leaves out: one skill is shared by all prompts, so that whatever is learned transfers to everything, and
    what was never trained on is not forgotten more than the rest. A group counts the same whatever its size, and a
    pilot that waited some steps counts as a fresh one: the model cannot say which group size is best. Rewards are 0 or
    1 and prompts of rate exactly 0 or 1 stay there. `gain_per_group` sets the pace of all methods alike, so ratios of
    rollouts between methods mean more than the rollouts themselves.

    Args:
        rates_P: Success rate of each prompt at the start, shape (P,), in [0, 1].
        gain_per_group: Logits gained from one trained group of m_g = 1/2; what a learning rate is to a model.
        critical_groups: Signal S of a step at which it gains half of what it would in proportion. None: infinite.
        forgetting: Share of the skill that is lost in each step.
        seed: Seed of the rewards.

    Raises:
        ConfigError: If a rate or a setting is out of its bounds.
    """

    def __init__(
        self,
        rates_P: ArrayLike,
        *,
        gain_per_group: float = 1e-4,
        critical_groups: float | None = None,
        forgetting: float = 0.0,
        seed: int = 0,
    ) -> None:
        rates = np.asarray(rates_P, dtype=np.float64)
        if rates.ndim != 1 or not len(rates) or not ((rates >= 0) & (rates <= 1)).all():
            raise ConfigError(
                f"rates_P has the shape {rates.shape} and values from {rates.min(initial=math.inf)} to "
                f"{rates.max(initial=-math.inf)}; give one success rate in [0, 1] per prompt, and at least one"
            )
        if not (gain_per_group >= 0 and math.isfinite(gain_per_group)):
            raise ConfigError(f"gain_per_group is {gain_per_group}; it must be finite and at least 0")
        if critical_groups is not None and not critical_groups > 0:
            raise ConfigError(f"critical_groups is {critical_groups}; it must be above 0, or None")
        if not 0 <= forgetting <= 1:
            raise ConfigError(f"forgetting is {forgetting}; it must be between 0 and 1")
        self.skill = 0.0
        self._gain_per_group = gain_per_group
        self._critical_groups = math.inf if critical_groups is None else critical_groups
        self._forgetting = forgetting
        self._rng = np.random.default_rng([seed, 1])  # not the generator of the scheduler's decisions
        with np.errstate(divide="ignore"):
            self._difficulty_P = np.log1p(-rates) - np.log(rates)
        ranks = (np.arange(min(_MEASURED, len(rates))) + 0.5) / min(_MEASURED, len(rates)) * len(rates)
        self._measured = np.sort(self._difficulty_P)[ranks.astype(np.int64)]

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self._difficulty_P)

    def rates(self, prompts: Sequence[int]) -> NDArray[np.float64]:
        """Success rates of these prompts now."""
        return _sigmoid(self.skill - self._difficulty_P[np.asarray(prompts, dtype=np.int64)])

    def successes(self, prompts: Sequence[int], num_rollouts: Sequence[int]) -> list[int]:
        """Generate `num_rollouts[j]` rollouts of `prompts[j]`; return how many of them succeed, per prompt."""
        found: list[int] = self._rng.binomial(np.asarray(num_rollouts), self.rates(prompts)).tolist()
        return found

    def mean_success(self) -> float:
        """Mean success rate of the pool, prompts that were removed among it.

        Of more than 4,096 prompts, so many that are evenly spaced in difficulty stand for all.
        """
        return float(_sigmoid(self.skill - self._measured).mean())

    def train(self, group_means: ArrayLike) -> None:
        """Make one update.

        Args:
            group_means: Share of successes of each trained group (m_g).
        """
        means = np.asarray(group_means, dtype=np.float64)
        signal = float((2 * np.sqrt(means * (1 - means))).sum())
        self.skill = (1 - self._forgetting) * self.skill + self._gain_per_group * signal / (
            1 + signal / self._critical_groups
        )


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        rates: NDArray[np.float64] = 1 / (1 + np.exp(-logits))
    return rates
