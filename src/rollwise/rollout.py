"""The records that everything passes along.

Shape suffixes used throughout: `_P` prompts (groups), `_G` rollouts of one group, `_B` rows of a batch,
`_N` rollouts in the replay buffer, `_T` tokens. `rewards_B` is a flat array, `rewards_PG` a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PromptId = int | str


@dataclass(frozen=True, slots=True)
class Request:
    """Ask for `num_rollouts` rollouts of one prompt.

    Attributes:
        prompt_id: One of the ids the scheduler was built with.
        num_rollouts: How many rollouts to generate, at least 1.
        purpose: Why: `"uniform"`, `"resample"` (a later round of the same step), `"pilot"` or `"commit"`.
    """

    prompt_id: PromptId
    num_rollouts: int
    purpose: str


@dataclass(frozen=True, slots=True)
class Allotment:
    """A `Request` as an allocation makes it, by the prompt's position in the scheduler's `prompt_ids`."""

    prompt: int
    num_rollouts: int
    purpose: str


@dataclass(slots=True)
class Rollout:
    """One completion of one prompt, scored, with what is needed to train on it later.

    The caller fills the first block; the scheduler fills the second.

    Attributes:
        prompt_id: The prompt it answers.
        reward: Its reward. NaN (or infinite) means *unscored*: it is counted and never trained on.
        payload: Whatever the trainer needs to build a training row, kept as it is. To be saved with the
            scheduler's state it must be a mapping from names to one-dimensional numpy arrays, or None.
        num_tokens: Tokens that were generated.
        num_loss_tokens: Tokens that carry loss; fewer than `num_tokens` where some are masked. None: all.
        nbytes: Memory of the payload in bytes, for the buffer's byte cap. 0: the sum over its arrays.
        td_error: Mean TD error over its valid tokens, where a critic gives one; for that priority of replay alone.
        owner: Rank that holds the payload, in a distributed run.
        purpose: See `Request.purpose`.
        birth_step: Training step whose policy generated it (the behaviour policy mu).
        birth_version: Version of that policy: how many batches of rollouts were begun before.
        birth_kl: Divergence covered when it was generated, in nats per token (`rollwise.replay.freshness.KLClock`).
        advantage: Group-relative advantage, frozen when its group was complete. NaN until then.
        group_mean: Mean reward of its group, frozen with the advantage.
        group_std: Standard deviation of its group's rewards, frozen with the advantage.
        num_uses: Batches it has been in.
    """

    prompt_id: PromptId
    reward: float
    payload: Any = None
    num_tokens: int = 0
    num_loss_tokens: int | None = None
    nbytes: int = 0
    owner: int = 0
    td_error: float = math.nan

    purpose: str = ""
    birth_step: int = -1
    birth_version: int = 0
    birth_kl: float = 0.0
    advantage: float = math.nan
    group_mean: float = math.nan
    group_std: float = math.nan
    num_uses: int = 0

    def __post_init__(self) -> None:
        if self.nbytes == 0 and isinstance(self.payload, Mapping):
            self.nbytes = sum(getattr(array, "nbytes", 0) for array in self.payload.values())

    @property
    def is_scored(self) -> bool:
        """Whether the reward is a finite number."""
        return math.isfinite(self.reward)

    @property
    def loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return self.num_tokens if self.num_loss_tokens is None else self.num_loss_tokens


@dataclass(slots=True)
class Group:
    """All rollouts of one prompt that share a baseline.

    Attributes:
        prompt: Position of the prompt in the scheduler's `prompt_ids`.
        birth_step: Step at which the group's first rollouts were generated.
        rollouts: Its rollouts, pilots before commits.
    """

    prompt: int
    birth_step: int
    rollouts: list[Rollout] = field(default_factory=list)

    def join(self, later: Group) -> None:
        """Take in later rollouts of the same prompt; the lists of both stay as they were."""
        self.rollouts = self.rollouts + later.rollouts


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a training batch.

    Attributes:
        rollout: The rollout.
        advantage: Its advantage, as frozen at birth.
        age_steps: Training steps since its behaviour policy was current; 0 for on-policy rows.
        source: The purpose it was generated for (see `Request.purpose`) if its group was completed in this step, else
            `"replay"`.
        weight: What its loss is multiplied by: its importance weight where `Replay.per_beta` is set, else 1.
    """

    rollout: Rollout
    advantage: float
    age_steps: int
    source: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """What one update trains on: fresh rows first, then replayed ones.

    With the composition "pool" the fresh rows are those that were drawn.

    Attributes:
        step: The training step it belongs to.
        rows: The rows, in order. Empty when nothing that was generated carries a gradient.
        normalizer_rows: Row count a row-mean loss (grpo, dr_grpo) divides by.
        normalizer_tokens: Token count a token-mean loss (dapo, cispo) divides by.
        success_rate: Mean success of the rollouts generated in this step; NaN if none was scored.
    """

    step: int
    rows: tuple[Row, ...]
    normalizer_rows: int
    normalizer_tokens: int
    success_rate: float
