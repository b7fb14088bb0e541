"""Group-relative advantages, and the tests on a group's rewards that decide whether it teaches anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollwise.errors import ConfigError
from rollwise.rollout import Group, Rollout

Scale = Literal["group", "batch", "none"]


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """What `group_advantages` computes.

    Attributes:
        advantages_B: Advantage per rollout; NaN where the reward is unscored.
        means_P: Mean reward per group over its scored rollouts; NaN if none is scored.
        stds_P: Standard deviation per group, same convention as the advantages; 0 for fewer than two.
        has_variance_P: Whether a group has two different rewards, that is, carries a gradient.
    """

    advantages_B: NDArray[np.float64]
    means_P: NDArray[np.float64]
    stds_P: NDArray[np.float64]
    has_variance_P: NDArray[np.bool_]


def group_advantages(
    rewards_B: ArrayLike,
    group_sizes_P: ArrayLike,
    *,
    scale: Scale = "group",
    ddof: int = 1,
    epsilon: float = 1e-4,
) -> GroupAdvantages:
    """Advantages of rollouts relative to their own group.

        A_i = (r_i - mean_g) / (std_g + epsilon)        scale "group" (GRPO)
        A_i = (r_i - mean_g) / (std_batch + epsilon)    scale "batch"
        A_i =  r_i - mean_g                             scale "none"  (Dr. GRPO)

    For binary rewards with k of G correct and ddof 0, `|A|` is sqrt((G-k)/k) for the correct rollouts and
    sqrt(k/(G-k)) for the wrong ones. A group whose rewards are all equal gets exactly 0, decided by their
    range: a floating-point std of equal numbers need not be zero. So does a group of one.

    Args:
        rewards_B: Rewards, shape (B,), groups one after the other. Not finite means unscored: such a rollout
            enters no mean and no std, and its advantage is NaN.
        group_sizes_P: Rollouts per group, shape (P,), each at least 1, summing to B.
        scale: What to divide by.
        ddof: 1 for the sample std that torch, TRL and verl use; 0 for the population std of the papers.
        epsilon: Added to the std, in units of the reward.

    Returns:
        The advantages with the groups' statistics.

    Raises:
        ConfigError: If the sizes do not fit the rewards or a setting is out of bounds.

    Source: GRPO, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783, section 3.1.
    """
    rewards_B = np.asarray(rewards_B, dtype=np.float64)
    sizes_P = np.asarray(group_sizes_P, dtype=np.int64)
    check_settings(scale, ddof, epsilon)
    if sizes_P.sum() != len(rewards_B) or (sizes_P < 1).any():
        raise ConfigError(
            f"group_sizes_P sum to {sizes_P.sum()} (smallest {sizes_P.min(initial=0)}) for {len(rewards_B)} "
            "rewards; give one size of at least 1 per group, summing to the number of rewards"
        )
    if len(sizes_P) == 0:
        empty = np.zeros(0)
        return GroupAdvantages(empty, empty, empty, np.zeros(0, dtype=bool))

    starts_P = np.cumsum(sizes_P) - sizes_P
    group_B = np.repeat(np.arange(len(sizes_P)), sizes_P)
    scored_B = np.isfinite(rewards_B)
    counts_P = np.add.reduceat(scored_B.astype(np.int64), starts_P)
    known_B = np.where(scored_B, rewards_B, 0.0)
    lowest_P = np.minimum.reduceat(np.where(scored_B, rewards_B, np.inf), starts_P)
    highest_P = np.maximum.reduceat(np.where(scored_B, rewards_B, -np.inf), starts_P)
    has_variance_P = highest_P > lowest_P

    with np.errstate(invalid="ignore"):
        means_P = np.where(counts_P > 0, np.add.reduceat(known_B, starts_P) / counts_P, np.nan)
    # Equal rewards: take the value itself, so that the difference to it is exactly zero.
    means_P = np.where((counts_P > 0) & ~has_variance_P, lowest_P, means_P)
    centred_B = np.where(scored_B, rewards_B - means_P[group_B], 0.0)
    squares_P = np.add.reduceat(centred_B**2, starts_P)
    stds_P = np.sqrt(squares_P / np.maximum(counts_P - ddof, 1)) * has_variance_P

    if scale == "group":
        divisors_B = stds_P[group_B] + epsilon
    elif scale == "batch":
        all_scored = rewards_B[scored_B]
        batch_std = float(all_scored.std(ddof=ddof)) if len(all_scored) > ddof else 0.0
        divisors_B = np.full(len(rewards_B), batch_std + epsilon)
    else:
        divisors_B = np.ones(len(rewards_B))
    # With epsilon 0, equal rewards divide by 0: they stay 0.
    advantages_B = np.divide(centred_B, divisors_B, out=np.zeros_like(centred_B), where=divisors_B > 0)
    return GroupAdvantages(np.where(scored_B, advantages_B, np.nan), means_P, stds_P, has_variance_P)


def freeze_advantages(
    groups: Sequence[Group], *, scale: Scale = "group", ddof: int = 1, epsilon: float = 1e-4
) -> dict[str, list[Rollout]]:
    """Set advantage, group mean and group std of all rollouts of complete groups.

    Args:
        groups: The groups.
        scale: See `group_advantages`, as for the rest.
        ddof: See there.
        epsilon: See there.

    Returns:
        The rollouts by what becomes of them: "unscored", "zero_variance" (their group's rewards are equal), "truncated"
        (no loss tokens), and "trained", which carry a gradient.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    stats = group_advantages(
        [rollout.reward for rollout in rollouts],
        [len(group.rollouts) for group in groups],
        scale=scale,
        ddof=ddof,
        epsilon=epsilon,
    )
    advantages_B = iter(stats.advantages_B.tolist())
    of_groups = zip(groups, stats.means_P.tolist(), stats.stds_P.tolist(), stats.has_variance_P.tolist(), strict=True)
    outcomes: dict[str, list[Rollout]] = {}
    for group, mean, std, has_variance in of_groups:
        for rollout in group.rollouts:
            rollout.advantage, rollout.group_mean, rollout.group_std = next(advantages_B), mean, std
            if not rollout.is_scored:
                outcome = "unscored"
            elif not has_variance:
                outcome = "zero_variance"
            elif not rollout.loss_tokens:
                outcome = "truncated"
            else:
                outcome = "trained"
            outcomes.setdefault(outcome, []).append(rollout)
    return outcomes


def without_baseline(groups: Sequence[Group]) -> dict[str, list[Rollout]]:
    """What becomes of rollouts whose advantages are not relative to a group, but a critic's at each use.

    Returns:
        As `freeze_advantages`; no rollout is left out for its group's sake. Advantages are set to 0: not known here.
    """
    outcomes: dict[str, list[Rollout]] = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.advantage = 0.0
        outcome = "unscored" if not rollout.is_scored else "trained" if rollout.loss_tokens else "truncated"
        outcomes.setdefault(outcome, []).append(rollout)
    return outcomes


def td_errors(rewards_T: ArrayLike, values_T: ArrayLike, gamma: float = 1.0) -> NDArray[np.float64]:
    """Temporal-difference errors `r_t + gamma V(s_{t+1}) - V(s_t)` over the loss tokens of one row.

    Args:
        rewards_T: Reward of each token, shape (T,).
        values_T: The critic's value before each token, shape (T,); after the last it is 0.
        gamma: Discount factor.

    Returns:
        Shape (T,), in the unit of rewards.
    """
    values_T = np.asarray(values_T, dtype=np.float64)
    errors_T: NDArray[np.float64] = np.asarray(rewards_T) + gamma * np.append(values_T[1:], 0.0) - values_T
    return errors_T


def check_settings(scale: str, ddof: int, epsilon: float) -> None:
    """Refuse settings that `group_advantages` cannot work with.

    Raises:
        ConfigError: If one of them is out of bounds.
    """
    if scale not in ("group", "batch", "none"):
        raise ConfigError(f"scale is {scale!r}; it must be 'group', 'batch' or 'none'")
    if ddof not in (0, 1):
        raise ConfigError(f"ddof is {ddof}; it must be 0 (population std) or 1 (sample std)")
    if not (epsilon >= 0 and np.isfinite(epsilon)):
        raise ConfigError(f"epsilon is {epsilon}; it must be finite and at least 0")


def success_rate(rewards: ArrayLike, success_threshold: float = 1.0) -> float:
    """Share of the scored rollouts whose reward is at least `success_threshold`; NaN if none is scored."""
    rewards = np.asarray(rewards, dtype=np.float64)
    scored = rewards[np.isfinite(rewards)]
    return np.count_nonzero(scored >= success_threshold) / len(scored) if len(scored) else float("nan")
