"""Successive elimination: prompts are sampled in rounds and leave once they have shown both outcomes.

After Reinforce-Ada, arXiv 2510.04996: many groups without reward variance are an artefact of few samples. A step is

1. sample   `round_rollouts` rollouts for each active prompt; in the first round all `train_prompts` are active;
2. leave    a prompt that shows at least `min_successes` successes and `min_failures` failures, over all its rounds;
3. repeat   with the prompts that are left, `max_rounds` rounds at most;
4. train    on the prompts whose rewards vary, each with all its rollouts as one group, or with `group_rollouts` of them
            (n): of S successes and F failures, k = min(S, max(n // 2, n - F)) successes and n - k failures, the
            first that were generated. Prompts that never vary are waste: zero_variance.

Reinforce-Ada-balance is min_successes = min_failures = n // 2 (n even), Reinforce-Ada-pos min_successes = 1 and
min_failures = 0; both with rounds of 8 rollouts, 4 rounds, and n = 4.

Not as in the paper: advantages are over the rollouts that are trained on. The paper takes the baseline from all
rollouts of a prompt even where it trains on n of them; `group_rollouts=None`, the default, comes to the same baseline
and trains on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollwise.allocation.groups import KeepsNoGroups, refuse_prompts, varies
from rollwise.allocation.prompt_pool import PromptPool
from rollwise.bounds import check_at_least
from rollwise.errors import ConfigError
from rollwise.ledger import Ledger
from rollwise.rollout import Allotment, Group, Rollout


@dataclass(frozen=True, kw_only=True)
class SuccessiveElimination:
    """Settings of successive elimination.

    Attributes:
        train_prompts: Prompts sampled per step; those that vary are trained on.
        round_rollouts: Rollouts per active prompt and round.
        max_rounds: Rounds in one step.
        min_successes: A prompt leaves with at least so many successes ...
        min_failures: ... and at least so many failures.
        group_rollouts: Rollouts of a prompt that are trained on, at least 2; None: all.
        success_threshold: A rollout succeeds if its reward is at least this.

    Raises:
        ConfigError: If a setting is out of its bounds.
    """

    train_prompts: int = 8
    round_rollouts: int = 8
    max_rounds: int = 4
    min_successes: int = 2
    min_failures: int = 2
    group_rollouts: int | None = None
    success_threshold: float = 1.0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "train_prompts", "round_rollouts", "max_rounds")
        check_at_least(self, 0, "min_successes", "min_failures")
        most = self.round_rollouts * self.max_rounds
        if most < 2:
            raise ConfigError(
                "round_rollouts is 1 and max_rounds is 1; a group needs at least 2 rollouts to vary, raise one of them"
            )
        if self.min_successes + self.min_failures > most:
            raise ConfigError(
                f"min_successes {self.min_successes} and min_failures {self.min_failures} need more rollouts than the "
                f"{most} of all rounds; lower them, or raise round_rollouts or max_rounds"
            )
        if self.group_rollouts is not None and self.group_rollouts < 2:
            raise ConfigError(f"group_rollouts is {self.group_rollouts}; it must be at least 2, or None for all")

    def build(self, pool: PromptPool, rng: np.random.Generator, ledger: Ledger) -> SuccessiveEliminationAllocator:
        """The allocator with these settings."""
        return SuccessiveEliminationAllocator(self, pool, ledger)


class SuccessiveEliminationAllocator(KeepsNoGroups):
    """Samples the active prompts round by round; what they show joins one group each."""

    name = "successive_elimination"

    def __init__(self, settings: SuccessiveElimination, pool: PromptPool, ledger: Ledger) -> None:
        self._settings = settings
        self._pool = pool
        self._ledger = ledger
        self._last_rounds, self._last_varying_share = 0, 0.0
        self._begin_step()

    def _begin_step(self) -> None:
        self._rounds = 0
        self._groups: dict[int, Group] = {}  # of all the step's prompts, in the order of the draw

    def ask(self, step: int, prompts: Sequence[int] | None) -> list[Allotment]:
        """A round of the prompts that are active; nothing once none is, or after the last round."""
        refuse_prompts(prompts, "successive elimination")
        settings = self._settings
        if self._rounds == settings.max_rounds:
            return []
        if self._rounds == 0:
            active, purpose = self._pool.draw(settings.train_prompts), "uniform"
        else:
            active = [prompt for prompt, group in self._groups.items() if not self._has_shown_both(group)]
            purpose = "resample"
        self._rounds += bool(active)
        return [Allotment(prompt, settings.round_rollouts, purpose) for prompt in active]

    def _has_shown_both(self, group: Group) -> bool:
        scored = [rollout for rollout in group.rollouts if rollout.is_scored]
        successes = sum(rollout.reward >= self._settings.success_threshold for rollout in scored)
        return successes >= self._settings.min_successes and len(scored) - successes >= self._settings.min_failures

    def tell(self, step: int, groups: list[tuple[Allotment, Group]]) -> None:
        """Join a round's rollouts to those of the earlier ones."""
        for _, group in groups:
            if group.prompt in self._groups:
                self._groups[group.prompt].join(group)
            else:
                self._groups[group.prompt] = group

    def take(self, step: int) -> list[Group]:
        """The groups that vary, downsampled if asked for; settles the rest and ends the step."""
        taken = []
        for group in self._groups.values():
            if varies(group.rollouts):
                self._downsample(group)
                taken.append(group)
            else:
                self._ledger.discard(group.rollouts, "zero_variance")
        self._last_rounds, self._last_varying_share = self._rounds, len(taken) / max(len(self._groups), 1)
        self._begin_step()
        return taken

    def _downsample(self, group: Group) -> None:
        num_kept = self._settings.group_rollouts
        scored = [rollout for rollout in group.rollouts if rollout.is_scored]
        if num_kept is None or len(scored) <= num_kept:
            return
        successes, failures = self._split(scored)
        num_successes = min(len(successes), max(num_kept // 2, num_kept - len(failures)))
        kept = {id(rollout) for rollout in successes[:num_successes] + failures[: num_kept - num_successes]}
        self._ledger.discard([rollout for rollout in group.rollouts if id(rollout) not in kept], "downsampled")
        group.rollouts = [rollout for rollout in group.rollouts if id(rollout) in kept]

    def _split(self, scored: list[Rollout]) -> tuple[list[Rollout], list[Rollout]]:
        """Successes and failures. Where all are one of these, part marks tell them apart: above the lowest, and lowest.

        So both parts of a group that varies hold a rollout, and what is kept of it varies.
        """
        rewards = [rollout.reward for rollout in scored]
        threshold = self._settings.success_threshold
        if threshold <= min(rewards) or threshold > max(rewards):
            threshold = min(reward for reward in rewards if reward > min(rewards))
        successes = [rollout for rollout in scored if rollout.reward >= threshold]
        return successes, [rollout for rollout in scored if rollout.reward < threshold]

    def state_dict(self) -> dict[str, Any]:
        """The last step's figures; nothing else outlives a step."""
        return {"last": [self._last_rounds, self._last_varying_share]}

    def restore(self, state: dict[str, Any], waiting: list[Group]) -> None:
        """Go on from a `state_dict()`; a step that is open is forgotten."""
        self._begin_step()
        self._last_rounds, self._last_varying_share = state["last"]

    def metrics(self) -> dict[str, float]:
        """Figures of the last step for the trainer's log."""
        return {
            "sampling_rounds": float(self._last_rounds),
            "varying_share": self._last_varying_share,
            "epoch": float(self._pool.epoch),
        }
