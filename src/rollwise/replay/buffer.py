"""The replay buffer: single rollouts, drawn by |advantage| and freshness, each for a bounded number of steps.

Source: "Rollout-Level Advantage-Prioritized Experience Replay for GRPO", arXiv 2606.04560, for the priority and
the age bound; "Freshness-Aware Prioritized Experience Replay", arXiv 2604.16918, for the exponential decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollwise.errors import ConfigError
from rollwise.replay.sampling import draw_without_replacement
from rollwise.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Settings of replay. The defaults are those of arXiv 2606.04560.

    Attributes:
        ratio: Replayed rows per fresh row that carries a gradient (r).
        alpha: Exponent of the priority; 0 draws uniformly.
        epsilon: Added to |advantage|, so that no stored rollout has priority 0.
        max_age_steps: Rollouts older than this are never drawn; None: no bound.
        decay_tau_steps: Priorities decay as exp(-age / tau) before alpha is applied; None: no decay.
        warmup_steps: Steps at the start of the run without replay; the buffer fills meanwhile.
        capacity_rollouts: The buffer holds at most this many rollouts; the oldest go first.
        capacity_bytes: The payloads it holds are at most this large together; the oldest go first.
    """

    ratio: float = 0.5
    alpha: float = 0.5
    epsilon: float = 1e-6
    max_age_steps: int | None = 10
    decay_tau_steps: float | None = None
    warmup_steps: int = 20
    capacity_rollouts: int = 30_000
    capacity_bytes: int = 2 * 1024**3

    def __post_init__(self) -> None:
        for name in ("ratio", "alpha", "epsilon", "warmup_steps"):
            if not (getattr(self, name) >= 0 and np.isfinite(getattr(self, name))):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be finite and at least 0")
        for name in ("capacity_rollouts", "capacity_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_age_steps is not None and self.max_age_steps < 1:
            raise ConfigError(
                f"max_age_steps is {self.max_age_steps}; a stored rollout is at least one step old when it is "
                "drawn, so it must be at least 1 (None: no bound; ratio 0: no replay)"
            )
        if self.decay_tau_steps is not None and not self.decay_tau_steps > 0:
            raise ConfigError(f"decay_tau_steps is {self.decay_tau_steps}; it must be above 0 (None: no decay)")


class ReplayBuffer:
    """Rollouts with time-invariant log priorities.

    With `base_i = |A_i| + epsilon`, the probability to be drawn at step t is

        P(i) ∝ (base_i * exp(-(t - birth_i) / tau))^alpha

    The factor exp(-alpha t / tau) is common to all rollouts, so the key

        log_key_i = alpha * (log base_i + birth_i / tau)

    never changes and gives the same distribution: nothing has to be refreshed as rollouts age.

    Args:
        settings: See `Replay`.
    """

    def __init__(self, settings: Replay) -> None:
        self.settings = settings
        self._rollouts_N: NDArray[np.object_] = np.empty(0, dtype=object)
        self._log_keys_N = np.empty(0)
        self._births_N = np.empty(0, dtype=np.int64)
        self._nbytes_N = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rollouts_N)

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads held."""
        return int(self._nbytes_N.sum())

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts held, oldest insertion first."""
        return list(self._rollouts_N)

    def log_keys(self, advantages_B: NDArray[np.float64], births_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """`alpha * (log(|A| + epsilon) + birth / tau)`, shape (B,); -inf where |A| + epsilon is 0."""
        settings = self.settings
        with np.errstate(divide="ignore"):
            log_base_B = np.log(np.abs(advantages_B) + settings.epsilon)
        # 0 * -inf is undefined; alpha 0 means uniform over whatever can be drawn at all.
        keys_B = settings.alpha * log_base_B if settings.alpha else np.where(np.isneginf(log_base_B), -np.inf, 0)
        if settings.decay_tau_steps is not None:
            keys_B = keys_B + settings.alpha * births_B / settings.decay_tau_steps
        return keys_B

    def insert(self, rollouts: Sequence[Rollout]) -> None:
        """Store rollouts with their advantages and birth steps as they are now."""
        if not rollouts:
            return
        births_B = np.array([rollout.birth_step for rollout in rollouts], dtype=np.int64)
        advantages_B = np.array([rollout.advantage for rollout in rollouts])
        if not np.isfinite(advantages_B).all():
            bad = rollouts[int(np.flatnonzero(~np.isfinite(advantages_B))[0])]
            raise ConfigError(f"the advantage of a rollout of prompt {bad.prompt_id!r} is {bad.advantage}")
        new = np.empty(len(rollouts), dtype=object)
        new[:] = rollouts
        self._rollouts_N = np.concatenate([self._rollouts_N, new])
        self._log_keys_N = np.concatenate([self._log_keys_N, self.log_keys(advantages_B, births_B)])
        self._births_N = np.concatenate([self._births_N, births_B])
        nbytes_B = np.array([rollout.nbytes for rollout in rollouts], dtype=np.int64)
        self._nbytes_N = np.concatenate([self._nbytes_N, nbytes_B])
        self._trim_to_capacity()

    def _trim_to_capacity(self) -> None:
        surplus = max(0, len(self) - self.settings.capacity_rollouts)
        excess_bytes = self.nbytes - self.settings.capacity_bytes
        if not surplus and excess_bytes <= 0:
            return
        # By birth, not by position: a survivor's pilots enter late, and must not push out what is younger.
        oldest_first_N = np.argsort(self._births_N, kind="stable")
        if excess_bytes > 0:
            freed_N = np.cumsum(self._nbytes_N[oldest_first_N])
            surplus = max(surplus, int(np.searchsorted(freed_N, excess_bytes)) + 1)
        kept_N = np.ones(len(self), dtype=bool)
        kept_N[oldest_first_N[:surplus]] = False
        self._keep(kept_N)

    def evict(self, step: int) -> None:
        """Drop what is older than the age bound at `step`."""
        if self.settings.max_age_steps is not None:
            fresh_N = step - self._births_N <= self.settings.max_age_steps
            if not fresh_N.all():
                self._keep(fresh_N)

    def draw(self, num_rollouts: int, step: int, rng: np.random.Generator) -> list[Rollout]:
        """Draw different rollouts, none older than the age bound at `step`; fewer if fewer are held."""
        self.evict(step)
        if num_rollouts <= 0 or not len(self):
            return []
        return list(self._rollouts_N[draw_without_replacement(self._log_keys_N, num_rollouts, rng)])

    def _keep(self, mask_N: NDArray[np.bool_]) -> None:
        self._rollouts_N = self._rollouts_N[mask_N]
        self._log_keys_N = self._log_keys_N[mask_N]
        self._births_N = self._births_N[mask_N]
        self._nbytes_N = self._nbytes_N[mask_N]
