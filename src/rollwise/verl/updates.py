"""How a batch, whose number of rows varies, is cut into optimizer steps: as many as verl cuts its own into."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollwise.verl.checks import is_critic


def num_updates(config: Any, model: Any) -> int:
    """Optimizer steps that a batch is cut into.

    Args:
        config: verl's.
        model: Its part on the actor or the critic.
    """
    return max(1, int(config.data.train_batch_size) // int(model.ppo_mini_batch_size))


def batch_multiple(config: Any, dp_size: int) -> int:
    """What verl shall pad the number of rows to: per process and optimizer step, any number of whole micro-batches.

    Args:
        config: verl's.
        dp_size: Processes that share a batch.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    multiple = dp_size * num_updates(config, actor)
    if not actor.use_dynamic_bsz:
        multiple *= math.lcm(actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu)
    if is_critic(config):
        critic = config.critic
        multiple = math.lcm(multiple, dp_size * num_updates(config, critic))
        if not critic.use_dynamic_bsz:
            sizes = critic.ppo_micro_batch_size_per_gpu, critic.get("forward_micro_batch_size_per_gpu") or 1
            multiple = math.lcm(multiple, dp_size * num_updates(config, critic) * math.lcm(*sizes))
    return multiple


@contextmanager
def mini_batches_of(config: Any, model: Any, num_rows: int) -> Iterator[None]:
    """Make verl cut `num_rows` rows into as many mini-batches as it cuts a batch of its own.

    Args:
        config: verl's.
        model: Its part on the actor or the critic.
        num_rows: With verl's padding rows.
    """
    rollout = config.actor_rollout_ref.rollout
    saved = model.ppo_mini_batch_size, rollout.n
    model.ppo_mini_batch_size, rollout.n = num_rows // num_updates(config, model), 1
    try:
        yield
    finally:
        model.ppo_mini_batch_size, rollout.n = saved
