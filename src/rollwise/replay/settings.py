"""The settings of replay.

Source: "Rollout-Level Advantage-Prioritized Experience Replay for GRPO", arXiv 2606.04560, for the defaults, the
priority and the age bound; "Freshness-Aware Prioritized Experience Replay", arXiv 2604.16918, for the exponential decay
and the replay-only updates; "Prioritized Experience Replay", arXiv 1511.05952, section 3.4, for the importance weights.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rollwise.bounds import check_at_least, check_choices, check_share, is_number
from rollwise.errors import ConfigError
from rollwise.replay.priority import PRIORITIES, Priority

#: Name of the priority that is the birth step itself.
RECENCY = "recency"
#: As `decay_tau_steps`: tau follows what is measured.
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Settings of replay. The defaults are those of arXiv 2606.04560.

    Ages run on three clocks: training steps (optimizer updates), policy versions (batches of rollouts generated), and
    the KL divergence that the policy has measurably covered, in nats per token. Each can bound the age and each can
    decay the priority; bounds hold together, and decays multiply.

    Attributes:
        ratio: Replayed rows per fresh row that carries a gradient (r).
        updates_per_fresh: Updates on replayed rows alone after each one with fresh rows (K); as large as that one's
            fresh part.
        alpha: Exponent of the priority; 0 draws uniformly.
        epsilon: Added to the priority, so that no stored rollout has priority 0.
        composition: "fresh_anchored": every batch holds the fresh rows, whole, and a draw from the buffer. "pool":
            fresh rows enter the buffer first, and the whole batch, (1 + ratio) times the fresh rows, is drawn from it.
        unit: What is drawn: single rollouts ("rollout"), or whole groups ("group") whose priority is the mean over
            their rollouts. A multi-turn trajectory is one rollout.
        priority: Name in `rollwise.replay.priority.PRIORITIES`, or a function like those; "recency" draws the newest
            first, ties at random.
        newcomers: Whether a unit enters with its own priority ("own"), or with the largest in the buffer until it has
            been drawn once ("max", as in PER).
        max_uses: A unit leaves the buffer once it has been drawn this often; None: no limit.
        max_age_steps: Rollouts older than this are never drawn; None: no bound.
        max_age_versions: The same in policy versions.
        max_age_kl: The same in nats per token.
        decay_tau_steps: Priorities decay as exp(-age / tau) before alpha is applied. "auto": tau is fitted to the
            measured fall of the effective sample size with age (`rollwise.replay.freshness.AutoTau`). None: no decay.
        decay_tau_versions: The same for the age in policy versions; a number or None.
        decay_tau_kl: The same for the age in nats per token; a number or None.
        per_beta: Replayed rows are weighted by (N P(i))^-beta, relative to the largest weight of the draw; PER starts
            at 0.4. None: no weights.
        per_beta_steps: Steps over which beta rises to 1; 0: it stays.
        warmup_steps: Steps at the start of the run without replay; the buffer fills meanwhile.
        capacity_rollouts: The buffer holds at most this many rollouts; the oldest go first.
        capacity_bytes: The payloads it holds are at most this large together; the oldest go first.

    Raises:
        ConfigError: If a setting is out of its bounds.
    """

    ratio: float = 0.5
    updates_per_fresh: int = 0
    alpha: float = 0.5
    epsilon: float = 1e-6
    composition: Literal["fresh_anchored", "pool"] = "fresh_anchored"
    unit: Literal["rollout", "group"] = "rollout"
    priority: str | Priority = "advantage"
    newcomers: Literal["own", "max"] = "own"
    max_uses: int | None = None
    max_age_steps: int | None = 10
    max_age_versions: int | None = None
    max_age_kl: float | None = None
    decay_tau_steps: float | Literal["auto"] | None = None
    decay_tau_versions: float | None = None
    decay_tau_kl: float | None = None
    per_beta: float | None = None
    per_beta_steps: int = 0
    warmup_steps: int = 20
    capacity_rollouts: int = 30_000
    capacity_bytes: int = 2 * 1024**3

    def __post_init__(self) -> None:
        for name in ("ratio", "alpha", "epsilon"):
            value = getattr(self, name)
            if not (is_number(value) and value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name} is {value!r}; it must be finite and at least 0")
        check_at_least(self, 0, "updates_per_fresh", "per_beta_steps", "warmup_steps")
        check_at_least(self, 1, "capacity_rollouts", "capacity_bytes")
        check_at_least(self, 1, "max_uses", or_none=True)
        check_share(self, "per_beta", or_none=True)
        if not callable(self.priority) and self.priority not in (*PRIORITIES, RECENCY):
            raise ConfigError(
                f"priority is {self.priority!r}; it must be one of {(*PRIORITIES, RECENCY)}, or a function of rollouts"
            )
        check_choices(self, composition=("fresh_anchored", "pool"), unit=("rollout", "group"), newcomers=("own", "max"))
        for name in ("max_age_steps", "max_age_versions"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value >= 1):
                raise ConfigError(
                    f"{name} is {value!r}; a stored rollout is at least one step old when it is "
                    "drawn, so it must be at least 1 (None: no bound; ratio 0: no replay)"
                )
        for name in ("max_age_kl", "decay_tau_steps", "decay_tau_versions", "decay_tau_kl"):
            value = getattr(self, name)
            if name == "decay_tau_steps" and value == AUTO:
                continue
            if value is not None and not (is_number(value) and value > 0):
                choices_left = f"a number above 0{', ' + repr(AUTO) if name == 'decay_tau_steps' else ''}, or None"
                raise ConfigError(f"{name} is {value!r}; it must be {choices_left}")
        if self.priority == RECENCY and self.per_beta:
            raise ConfigError(
                "per_beta weighs by the probability of a draw, which 'recency' has none of; set it to None"
            )

    @property
    def is_on(self) -> bool:
        """Whether anything is ever replayed."""
        return self.ratio > 0 or self.updates_per_fresh > 0

    def as_dict(self) -> dict[str, Any]:
        """The settings, JSON-able: a priority of the user's own is None."""
        return asdict(self) | {"priority": None if callable(self.priority) else self.priority}

    def beta(self, step: int) -> float:
        """Exponent of the importance weights at `step`: from `per_beta` to 1 over `per_beta_steps`."""
        start = self.per_beta or 0.0
        progress = min(1.0, step / self.per_beta_steps) if self.per_beta_steps else 0.0
        return start + (1.0 - start) * progress
