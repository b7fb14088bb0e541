"""What several allocations share: what a group shows, and what outlives no step."""

from __future__ import annotations

from collections.abc import Sequence

from rollwise.errors import ConfigError
from rollwise.rollout import Group, Rollout


def varies(rollouts: Sequence[Rollout]) -> bool:
    """Whether two of the scored rewards differ. Their range says so; a float std of equal rewards need not be zero."""
    rewards = [rollout.reward for rollout in rollouts if rollout.is_scored]
    return bool(rewards) and max(rewards) > min(rewards)


def outcomes(rollouts: Sequence[Rollout], success_threshold: float) -> list[bool]:
    """Whether each of the scored rollouts succeeded."""
    return [rollout.reward >= success_threshold for rollout in rollouts if rollout.is_scored]


def refuse_prompts(prompts: Sequence[int] | None, allocation: str) -> None:
    """Refuse prompts from outside, for an allocation that chooses its own.

    Raises:
        ConfigError: If there are any.
    """
    if prompts is not None:
        raise ConfigError(f"{allocation} chooses its prompts itself; ask without `prompts`")


class KeepsNoGroups:
    """The part of an `Allocator` that is the same for all that train within the step and never run out of prompts."""

    @property
    def exhausted(self) -> str | None:
        """None: there is always a further step."""
        return None

    def waiting(self) -> list[Group]:
        """Groups kept for later steps: none."""
        return []
