"""What makes a stored rollout worth drawing: base priorities, before freshness and alpha.

Each is a function from rollouts with frozen advantages to non-negative numbers, shape (B,). A name or a function of
one's own can be given as `Replay.priority`.

Source: |advantage| and the group's standard deviation, "Rollout-Level Advantage-Prioritized Experience Replay for
GRPO", arXiv 2606.04560; |reward| and |TD error|, "Freshness-Aware Prioritized Experience Replay", arXiv 2604.16918.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollwise.errors import ConfigError, RolloutError
from rollwise.rollout import Rollout

Priority = Callable[[Sequence[Rollout]], NDArray[np.float64]]


def abs_advantage(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """`|A_i|`: how far a rollout is from its group's mean."""
    return np.abs([rollout.advantage for rollout in rollouts])


def positive_advantage(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """`max(A_i, 0)`: only what was better than its group's mean; the others are drawn by epsilon alone."""
    return np.maximum([rollout.advantage for rollout in rollouts], 0.0)


def reward(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """`r_i`: successes first. Rewards below 0 count as 0, for a priority cannot be negative."""
    return np.maximum([rollout.reward for rollout in rollouts], 0.0)


def abs_reward(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """`|r_i|`. Rollouts of reward 0 are drawn by epsilon alone, that is, hardly ever."""
    return np.abs([rollout.reward for rollout in rollouts])


def group_std(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """Standard deviation of the rewards of a rollout's group: the same for all of a group."""
    return np.array([rollout.group_std for rollout in rollouts], dtype=np.float64)


def abs_td_error(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """`|TD error|`, the mean over a rollout's valid tokens, as the trainer or the user has set it.

    Raises:
        RolloutError: If a rollout has none.
    """
    errors = np.abs([rollout.td_error for rollout in rollouts])
    if np.isnan(errors).any():
        missing = rollouts[int(np.flatnonzero(np.isnan(errors))[0])]
        raise RolloutError(
            f"a rollout of prompt {missing.prompt_id!r} has no TD error; set Rollout.td_error when it is told, or "
            "choose another priority"
        )
    return errors


def uniform(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """1 for every rollout."""
    return np.ones(len(rollouts))


#: Priorities by the name that configurations use.
PRIORITIES: dict[str, Priority] = {
    "advantage": abs_advantage,
    "positive_advantage": positive_advantage,
    "reward": reward,
    "abs_reward": abs_reward,
    "group_std": group_std,
    "td_error": abs_td_error,
    "uniform": uniform,
}


def named_priority(name: str) -> str | Priority:
    """A priority as configurations name it: a key of `PRIORITIES` as it is, or a user's function by its dotted path.

    Raises:
        ConfigError: If a dotted path leads to nothing.
    """
    if "." not in name:
        return name
    module, _, function = name.rpartition(".")
    try:
        found: Priority = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"priority is {name!r}, and there is no such function ({error}); give a name such as 'advantage', or a "
            "dotted path that can be imported from here"
        ) from error
    return found
