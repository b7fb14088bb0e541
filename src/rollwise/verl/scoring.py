"""What verl's agent loop has left of each session, as the scheduler's rollouts: scalars alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from rollwise.errors import RewardError
from rollwise.ledger import Ledger
from rollwise.rollout import Request, Rollout
from rollwise.verl import queue
from rollwise.verl.queue import GENERATED
from rollwise.verl.rows import stored_nbytes

logger = logging.getLogger(__name__)

#: Sessions by (uid of the prompt, number), each with the keys of its rows.
Sessions = Mapping[tuple[str, int], Sequence[str]]

#: What verl counts of them, and their outcome in the ledger.
_FILTERED = {"evicted_samples": "zero_variance", "discarded_surplus_samples": "surplus"}


def as_rollouts(
    requests: Sequence[Request], uids: Sequence[str], found: Sessions, *, stores_old_log_probs: bool
) -> dict[tuple[str, int], Rollout]:
    """One rollout for each session that was asked for, in order; unscored where it failed.

    Args:
        requests: What was asked for.
        uids: Of each request's prompt.
        found: What there is.
        stores_old_log_probs: Whether the trained model's log-probs will be stored as well, for the size.
    """
    keys = [key for session in found.values() for key in session]
    read = queue.get_as_far_as(keys, GENERATED, ("prompts", "response_mask"), "rm_scores")
    rows = dict(zip(keys, read, strict=True))
    rollouts: dict[tuple[str, int], Rollout] = {}
    for uid, request in zip(uids, requests, strict=True):
        for session in range(request.num_rollouts):
            mine = [rows[key] for key in found.get((uid, session), ())]
            if not mine or "rm_scores" not in mine[-1]:
                rollouts[uid, session] = Rollout(request.prompt_id, math.nan)
                continue
            num_tokens = sum(int(row["response_mask"].sum()) for row in mine)
            sizes = [(len(row["prompts"]), len(row["response_mask"])) for row in mine]
            nbytes = stored_nbytes(
                len(mine), sum(p for p, _ in sizes), sum(r for _, r in sizes), with_old_log_probs=stores_old_log_probs
            )
            reward = float(mine[-1]["rm_scores"].sum())
            rollouts[uid, session] = Rollout(request.prompt_id, reward, num_tokens=num_tokens, nbytes=nbytes)
    return rollouts


def check_rewards(rollouts: Sequence[Rollout], *, has_worked: bool) -> None:
    """Tell a reward function that is broken from one that fails for some rollouts.

    Raises:
        RewardError: If no rollout has a reward, and none before had one.
    """
    num_unscored = sum(not rollout.is_scored for rollout in rollouts)
    if num_unscored == len(rollouts) and not has_worked:
        raise RewardError(
            f"none of the first {len(rollouts)} rollouts has a reward; the log of verl's AgentLoopWorker says why "
            "(the reward function or the agent loop raises, or the reward is not a number)"
        )
    if num_unscored:
        logger.warning("%d of %d rollouts have no reward and are left unscored.", num_unscored, len(rollouts))


def count_filtered(metrics: Mapping[str, float], group_size: int, step: int, ledger: Ledger) -> int:
    """Count the groups that verl's own dynamic sampling has dropped; their tokens are not known here.

    Args:
        metrics: verl's sampler's.
        group_size: Rollouts per prompt.
        step: That has generated them.
        ledger: Counts them.

    Returns:
        The number of their rollouts.
    """
    counted = 0
    for name, outcome in _FILTERED.items():
        num_rollouts = int(metrics.get(f"training/filter_groups/{name}", 0)) * group_size
        lost = [Rollout("", math.nan, purpose="resample", birth_step=step) for _ in range(num_rollouts)]
        ledger.record(lost)
        ledger.settle(lost, outcome)
        counted += num_rollouts
    return counted
