"""How old a rollout is, on three clocks, and how fast its priority should fall with that.

Source: "Freshness-Aware Prioritized Experience Replay", arXiv 2604.16918, section on freshness: priorities decay as
exp(-age / tau) because the effective sample size of old rollouts falls with the divergence from their behaviour
policy, ESS / n <= exp(-KL). Fitting tau to what is measured, and a clock of measured divergence, are Rollwise's own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_STEPS_KEPT = 4096  # readings to estimate from; rows older than this do not take part


class Clock(NamedTuple):
    """A moment of training on the three clocks. An age is a difference of two of them.

    Attributes:
        step: Training steps (optimizer updates) since the run began.
        version: Policy versions: how many batches of rollouts were begun.
        kl: Divergence covered so far in nats per token, see `KLClock`.
    """

    step: int
    version: int = 0
    kl: float = 0.0


class KLClock:
    """How far the policy has moved since the run began: cumulative KL, in nats per token.

    A row born at step b and trained on at step t measures kl_i, about C(t) - C(b), where C is the clock. So at step t,
    with n_i the row's tokens and over rows of age 1 or more,

        C(t) = max(C(t - 1), sum_i n_i (C(b_i) + kl_i) / sum_i n_i)

    In a step without such rows the clock stands still; it catches up with the next one that has some.
    """

    def __init__(self) -> None:
        self._reading = 0.0
        self._by_step: dict[int, float] = {}

    @property
    def reading(self) -> float:
        """C now."""
        return self._reading

    def observe(self, step: int, entries_B: NDArray[np.float64]) -> None:
        """Take the rows that step `step` trained on, as `rollwise.diagnostics.row_entries` describes them.

        To be called for every step, be it with no rows.
        """
        ages_B, tokens_B, divergences_B = entries_B[:, 0].astype(np.int64), entries_B[:, 1], entries_B[:, 5]
        tokens, weighted = 0.0, 0.0
        for age in np.unique(ages_B[ages_B > 0]).tolist():
            birth = self._by_step.get(step - age)
            if birth is not None:
                is_of_age_B = ages_B == age
                num_tokens = float(tokens_B[is_of_age_B].sum())
                tokens += num_tokens
                weighted += num_tokens * birth + float(divergences_B[is_of_age_B].sum())
        if tokens:
            self._reading = max(self._reading, weighted / tokens)
        self._by_step[step] = self._reading  # for rollouts that were born in it
        while len(self._by_step) > _STEPS_KEPT:
            del self._by_step[next(iter(self._by_step))]

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides later readings, JSON-able."""
        return {"reading": self._reading, "by_step": [[step, kl] for step, kl in self._by_step.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._reading, self._by_step = state["reading"], dict(state["by_step"])


class AutoTau:
    """The tau at which exp(-age / tau) falls as the effective sample size of replayed rows does.

    With ESS_a the token-level effective sample size of the rows of age a >= 1, n_a their tokens, a least-squares line
    through the origin of -log ESS_a over a:

        1 / tau = sum_a n_a a (-log ESS_a) / sum_a n_a a^2

    Both sums are forgotten with a half-life of `half_life_steps`. tau is taken over when it has left the one in force
    by more than `tolerance` (then all keys of the buffer change).
    """

    half_life_steps = 20
    tolerance = 0.1

    def __init__(self) -> None:
        self.tau_steps: float | None = None
        self._fall = self._weight = 0.0

    def observe(self, entries_B: NDArray[np.float64]) -> bool:
        """Take the rows of one step (see `KLClock.observe`); whether tau changed."""
        ages_B = entries_B[:, 0]
        fall, weight = 0.0, 0.0
        for age in np.unique(ages_B[ages_B >= 1]).tolist():
            _, tokens, _, ratios, squares, *_ = entries_B[ages_B == age].sum(axis=0).tolist()
            log_ess = min(0.0, 2 * math.log(ratios) - math.log(tokens) - math.log(squares))
            fall -= tokens * age * log_ess
            weight += tokens * age**2
        if not weight:
            return False
        kept = 0.5 ** (1 / self.half_life_steps)
        self._fall, self._weight = kept * self._fall + fall, kept * self._weight + weight
        if self._fall <= 0:  # nothing has gone stale yet
            return False
        tau = self._weight / self._fall
        if self.tau_steps is not None and abs(math.log(tau / self.tau_steps)) <= math.log1p(self.tolerance):
            return False
        self.tau_steps = tau
        return True

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides later values, JSON-able."""
        return {"tau_steps": self.tau_steps, "fall": self._fall, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self.tau_steps, self._fall, self._weight = state["tau_steps"], state["fall"], state["weight"]
