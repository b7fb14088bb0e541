"""Uniform allocation: the same number of rollouts for every prompt of a batch. This is plain GRPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollwise.allocation.groups import KeepsNoGroups
from rollwise.allocation.prompt_pool import PromptPool
from rollwise.bounds import check_at_least
from rollwise.ledger import Ledger
from rollwise.rollout import Allotment, Group


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Settings of uniform allocation.

    Attributes:
        train_prompts: Prompts per step.
        num_rollouts: Rollouts per prompt (G), at least 2 where advantages are relative to the group.
    """

    train_prompts: int = 8
    num_rollouts: int = 8

    def __post_init__(self) -> None:
        check_at_least(self, 1, "train_prompts", "num_rollouts")

    def build(self, pool: PromptPool, rng: np.random.Generator, ledger: Ledger) -> UniformAllocator:
        """The allocator with these settings."""
        return UniformAllocator(self, pool)


class UniformAllocator(KeepsNoGroups):
    """Asks for `num_rollouts` of each of `train_prompts` prompts, once per step."""

    name = "uniform"

    def __init__(self, settings: Uniform, pool: PromptPool) -> None:
        self._settings = settings
        self._pool = pool
        self._asked = False
        self._groups: list[Group] = []

    def ask(self, step: int, prompts: Sequence[int] | None) -> list[Allotment]:
        """The step's requests at the first call, nothing after. `prompts` chooses them from outside."""
        if self._asked:
            return []
        self._asked = True
        if prompts is None:
            prompts = self._pool.draw(self._settings.train_prompts)
        return [Allotment(prompt, self._settings.num_rollouts, "uniform") for prompt in prompts]

    def tell(self, step: int, groups: list[tuple[Allotment, Group]]) -> None:
        """Take the groups that answer the requests."""
        self._groups = [group for _, group in groups]

    def take(self, step: int) -> list[Group]:
        """The groups to train on; ends the step."""
        groups, self._groups, self._asked = self._groups, [], False
        return groups

    def restore(self, state: dict[str, Any], waiting: list[Group]) -> None:
        """Nothing outlives a step; one that is open is forgotten."""
        self._asked, self._groups = False, []

    def state_dict(self) -> dict[str, Any]:
        """Nothing outlives a step."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Figures for the trainer's log: none."""
        return {}
