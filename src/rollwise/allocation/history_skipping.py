"""History skipping: prompts whose last groups had no reward variance are mostly not sampled at all.

After GRESO, "Act Only When It Pays", arXiv 2506.02177. A prompt that comes up is skipped with probability

    1 - p_explore^z

where z counts its last visits in a row whose groups had no variance (the paper's formula), and p_explore is
`explore_easy` where the last of these groups was all right, `explore_hard` where it was not. A visit with variance sets
z to 0: the prompt is sampled for sure. A skipped prompt keeps its z, and comes up again in the next epoch. A step is

1. draw     prompts in the pool's order, each sampled or skipped, until `train_prompts` are to be sampled, or
            `max_skips_factor` x `train_prompts` were looked at; then the first that were skipped fill the batch;
2. sample   `num_rollouts` rollouts of each, in one round, and train on them as plain GRPO does.

The paper adjusts p_explore: with the target alpha for the share of groups without variance (a third of it for easy
prompts, two thirds for hard ones), p_explore falls by 0.01 after a step whose share is at least the target, else rises
by 0.01, within [0.05, 0.95] and from the second epoch on (the bounds and the start are those of the official code).

Not as in the paper: GRESO goes on with rounds of dynamic sampling until the batch is full of groups that vary, and
adapts the size of these rounds; here a step is one round, so that what the skipping itself saves can be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollwise.allocation.groups import KeepsNoGroups, refuse_prompts, varies
from rollwise.allocation.prompt_pool import PromptPool
from rollwise.bounds import check_at_least, check_share
from rollwise.errors import ConfigError
from rollwise.ledger import Ledger
from rollwise.rollout import Allotment, Group

EXPLORE_STEP = 0.01
EXPLORE_BOUNDS = (0.05, 0.95)
TARGET_SHARES = {"easy": 1 / 3, "hard": 2 / 3}  # of target_zero_variance


@dataclass(frozen=True, kw_only=True)
class HistorySkipping:
    """Settings of history skipping.

    Attributes:
        train_prompts: Prompts sampled per step.
        num_rollouts: Rollouts per prompt (G), at least 2.
        explore_easy: p_explore of prompts that were all right, from 0 (skipped once z is 1) to 1 (never skipped).
        explore_hard: p_explore of prompts whose rewards were equal, but were no successes.
        success_threshold: A rollout succeeds if its reward is at least this.
        max_skips_factor: A step looks at most at so many times train_prompts prompts.
        target_zero_variance: Share of groups without variance that p_explore is adjusted towards (the paper: 0.25).
            None: p_explore stays as it is set.

    Raises:
        ConfigError: If a setting is out of its bounds.
    """

    train_prompts: int = 8
    num_rollouts: int = 8
    explore_easy: float = 0.5
    explore_hard: float = 0.5
    success_threshold: float = 1.0
    max_skips_factor: int = 5
    target_zero_variance: float | None = None

    def __post_init__(self) -> None:
        check_at_least(self, 1, "train_prompts", "max_skips_factor")
        if self.num_rollouts < 2:
            raise ConfigError(f"num_rollouts is {self.num_rollouts}; a group needs at least 2 rollouts to vary")
        check_share(self, "explore_easy", "explore_hard")
        check_share(self, "target_zero_variance", or_none=True)

    def build(self, pool: PromptPool, rng: np.random.Generator, ledger: Ledger) -> HistorySkippingAllocator:
        """The allocator with these settings."""
        return HistorySkippingAllocator(self, pool, rng)


class HistorySkippingAllocator(KeepsNoGroups):
    """Remembers how often in a row each prompt's groups had no variance, and skips by it."""

    name = "history_skipping"

    def __init__(self, settings: HistorySkipping, pool: PromptPool, rng: np.random.Generator) -> None:
        self._settings = settings
        self._pool = pool
        self._rng = rng
        self._streaks_P = np.zeros(pool.num_prompts, dtype=np.int64)  # z
        self._was_easy_P = np.zeros(pool.num_prompts, dtype=bool)  # in the last of these visits
        self._explore = {"easy": settings.explore_easy, "hard": settings.explore_hard}
        self._skipped_share = 0.0
        self._begin_step()

    def _begin_step(self) -> None:
        self._asked = False
        self._groups: list[Group] = []

    def ask(self, step: int, prompts: Sequence[int] | None) -> list[Allotment]:
        """The step's requests at the first call, nothing after."""
        refuse_prompts(prompts, "history skipping")
        if self._asked:
            return []
        self._asked = True
        return [Allotment(prompt, self._settings.num_rollouts, "uniform") for prompt in self._choose()]

    def _choose(self) -> list[int]:
        wanted = self._settings.train_prompts
        most = self._settings.max_skips_factor * wanted
        chosen: list[int] = []
        skipped: list[int] = []
        while len(chosen) < wanted and len(chosen) + len(skipped) < most:
            num_draws = min(wanted - len(chosen), most - len(chosen) - len(skipped))
            drawn = self._pool.draw(num_draws, {*chosen, *skipped})
            if not drawn:  # the whole pool has been looked at
                break
            for prompt in drawn:
                (skipped if self._rng.random() < self.skip_probability(prompt) else chosen).append(prompt)
        self._skipped_share = len(skipped) / max(len(chosen) + len(skipped), 1)
        return chosen + skipped[: wanted - len(chosen)]

    def skip_probability(self, prompt: int) -> float:
        """`1 - p_explore^z` of the prompt at this position, as it stands."""
        explore = self._explore["easy" if self._was_easy_P[prompt] else "hard"]
        return 1.0 - explore ** int(self._streaks_P[prompt])

    def tell(self, step: int, groups: list[tuple[Allotment, Group]]) -> None:
        """Take the groups that answer the requests, and remember which of them had no variance."""
        self._groups = [group for _, group in groups]
        visits = {"easy": 0, "hard": 0, "mixed": 0}
        for group in self._groups:
            rewards = [rollout.reward for rollout in group.rollouts if rollout.is_scored]
            if len(rewards) < 2:  # says nothing about the prompt
                continue
            is_easy = rewards[0] >= self._settings.success_threshold
            if varies(group.rollouts):
                self._streaks_P[group.prompt] = 0
                visits["mixed"] += 1
            else:
                self._streaks_P[group.prompt] += 1
                self._was_easy_P[group.prompt] = is_easy
                visits["easy" if is_easy else "hard"] += 1
        if self._settings.target_zero_variance is not None and self._pool.epoch > 1 and any(visits.values()):
            self._adjust(visits, self._settings.target_zero_variance)

    def _adjust(self, visits: dict[str, int], target: float) -> None:
        lowest, highest = EXPLORE_BOUNDS
        for kind, part in TARGET_SHARES.items():
            is_met = visits[kind] / sum(visits.values()) >= part * target
            moved = self._explore[kind] + (-EXPLORE_STEP if is_met else EXPLORE_STEP)
            self._explore[kind] = min(max(moved, lowest), highest)

    def take(self, step: int) -> list[Group]:
        """The groups to train on; ends the step."""
        groups = self._groups
        self._begin_step()
        return groups

    def state_dict(self) -> dict[str, Any]:
        """The history of the prompts with a z, the exploration probabilities as adjusted, the last step's figure."""
        known = np.flatnonzero(self._streaks_P)
        return {
            "prompts": known.tolist(),
            "streaks": self._streaks_P[known].tolist(),
            "was_easy": self._was_easy_P[known].tolist(),
            "explore": dict(self._explore),
            "skipped_share": self._skipped_share,
        }

    def restore(self, state: dict[str, Any], waiting: list[Group]) -> None:
        """Go on from a `state_dict()`. Exploration probabilities that are not adjusted are the settings'."""
        self._begin_step()
        known = np.array(state["prompts"], dtype=np.int64)
        self._streaks_P[:] = 0
        self._streaks_P[known], self._was_easy_P[known] = state["streaks"], state["was_easy"]
        if self._settings.target_zero_variance is not None:
            self._explore = dict(state["explore"])
        self._skipped_share = state["skipped_share"]

    def metrics(self) -> dict[str, float]:
        """Figures for the trainer's log: what the last step skipped, z over all prompts, p_explore."""
        return {
            "skipped_share": self._skipped_share,
            "mean_zero_variance_visits": float(self._streaks_P.mean()),
            "explore_easy": self._explore["easy"],
            "explore_hard": self._explore["hard"],
            "epoch": float(self._pool.epoch),
        }
