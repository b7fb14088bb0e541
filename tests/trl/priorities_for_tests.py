"""A priority of a user's own, found by its dotted path."""

import numpy as np


def shortest_first(rollouts):
    """1 / length."""
    return 1.0 / np.array([rollout.num_tokens for rollout in rollouts])
