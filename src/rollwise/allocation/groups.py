"""What several allocations ask of a group: whether it teaches, and what becomes of rollouts that are not trained on."""

from __future__ import annotations

from collections.abc import Sequence

from rollwise.ledger import Ledger
from rollwise.rollout import Rollout


def varies(rollouts: Sequence[Rollout]) -> bool:
    """Whether two of the scored rewards differ. Their range says so; a float std of equal rewards need not be zero."""
    rewards = [rollout.reward for rollout in rollouts if rollout.is_scored]
    return bool(rewards) and max(rewards) > min(rewards)


def discard(ledger: Ledger, rollouts: Sequence[Rollout], outcome: str) -> None:
    """Settle rollouts that are not trained on: the scored ones with `outcome`, the others as unscored."""
    ledger.settle([rollout for rollout in rollouts if rollout.is_scored], outcome)
    ledger.settle([rollout for rollout in rollouts if not rollout.is_scored], "unscored")
