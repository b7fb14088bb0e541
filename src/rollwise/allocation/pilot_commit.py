"""Pilot-Commit: a few pilot rollouts per prompt, then the budget goes to the prompts that teach.

Source: "Spend Your Rollouts Where It Counts", arXiv 2605.26606. For binary rewards the magnitude of a group's
normalised gradient goes with sqrt(p (1 - p)), largest at success rate p = 1/2 (Prop. 3.1): rollouts on prompts with
p near 0 or 1 are wasted. A step is

1. pilot    `pilot_rollouts` rollouts for each of `pilot_prompts` prompts, which give a success rate p_hat;
2. triage   p_hat >= p_solve: solved, removed (here: once there is evidence enough).
            p_hat > p_upper: too easy, back in the next epoch.
            p_hat < p_lower: too hard, deferred to the next epoch. Otherwise: a survivor;
3. commit   `commit_rollouts` more rollouts for `train_prompts` survivors;
4. train    on pilots and commits as one group. Surplus survivors wait, with their pilots, for later steps.

Binding sends out a step's commits and the next step's pilots together, in one generate call. Those pilots are
one step old when they are used: their stored behaviour log-probs correct that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollwise.allocation.groups import outcomes, refuse_prompts
from rollwise.allocation.prompt_pool import PromptPool
from rollwise.bounds import check_at_least, check_choices, check_share
from rollwise.errors import ConfigError
from rollwise.ledger import Ledger
from rollwise.rollout import Allotment, Group

#: How survivors are chosen when there are more than a batch takes: name -> sort key (ascending; ties by a
#: random order that is drawn first). `group` is a survivor with its pilots.
SURVIVOR_SELECTIONS = {
    "random": lambda group: 0.0,
    "most_recent": lambda group: -group.birth_step,
    "max_variance": lambda group: -float(np.var([r.reward for r in group.rollouts if r.is_scored])),
}


@dataclass(frozen=True, kw_only=True)
class PilotCommit:
    """Settings of Pilot-Commit. The defaults are the paper's for n = 64, scaled to 32 prompts a step.

    Attributes:
        train_prompts: Prompts that are committed to and trained on per step (b_t).
        pilot_rollouts: Pilot rollouts per prompt (n_pilot).
        commit_rollouts: Further rollouts per survivor (n_commit).
        pilot_prompts: Prompts piloted per round (b_g); None: 3 x train_prompts.
        p_lower: Below this success rate a prompt is too hard for now.
        p_upper: Above this success rate a prompt is too easy.
        p_solve: At or above this success rate a prompt is solved.
        success_threshold: A rollout succeeds if its reward is at least this.
        easy_prompts: What happens to too easy prompts: "next_epoch" or "remove".
        solved_prompts: What happens to solved prompts. "retire": they leave the pool once `retire_rollouts` of their
            rollouts in a row have succeeded, and some are piloted again at times: one failure brings a prompt back.
            "remove": they leave for good (the paper). "next_epoch": they stay. Removal on the evidence of a few
            pilots can empty a small pool: with 4 pilots a prompt of success rate 0.75 is taken for solved a third
            of the time.
        retire_rollouts: Successful rollouts in a row after which a prompt retires. At 28 its success rate is above 0.9
            with 95% confidence (of a uniform prior).
        recheck_share: Share of a round's prompts that are retired ones, drawn at random.
        downsample_pilots: Keep so many of a survivor's pilots, those of the largest reward variance; None: all.
        max_survivor_age_steps: A survivor whose pilots are older than this when it would be used is dropped.
        bind_pilots: Send the next step's pilots along with this step's commits.
        pilot_every_step: Pilot a new round in every step (the paper); otherwise only while fewer than
            train_prompts survivors wait.
        survivor_selection: Which survivors are committed to: "random", "most_recent" or "max_variance".
        max_pilot_rounds: Rounds of pilots in one step; afterwards the step trains on what survived.
    """

    train_prompts: int = 32
    pilot_rollouts: int = 16
    commit_rollouts: int = 48
    pilot_prompts: int | None = None
    p_lower: float = 0.125
    p_upper: float = 0.75
    p_solve: float = 1.0
    success_threshold: float = 1.0
    easy_prompts: Literal["next_epoch", "remove"] = "next_epoch"
    solved_prompts: Literal["retire", "remove", "next_epoch"] = "retire"
    retire_rollouts: int = 28
    recheck_share: float = 0.02
    downsample_pilots: int | None = None
    max_survivor_age_steps: int = 4
    bind_pilots: bool = True
    pilot_every_step: bool = True
    survivor_selection: Literal["random", "most_recent", "max_variance"] = "random"
    max_pilot_rounds: int = 10

    def __post_init__(self) -> None:
        counts = ("train_prompts", "pilot_rollouts", "commit_rollouts", "max_pilot_rounds", "retire_rollouts")
        check_at_least(self, 1, *counts)
        check_at_least(self, 1, "pilot_prompts", or_none=True)
        check_share(self, "recheck_share")
        if self.downsample_pilots is not None and not 1 <= self.downsample_pilots <= self.pilot_rollouts:
            raise ConfigError(
                f"downsample_pilots is {self.downsample_pilots}; it must be between 1 and pilot_rollouts "
                f"{self.pilot_rollouts}, or None"
            )
        if not 0 <= self.p_lower <= self.p_upper <= self.p_solve:
            raise ConfigError(
                f"p_lower {self.p_lower}, p_upper {self.p_upper}, p_solve {self.p_solve}: they must be in "
                "ascending order, from 0 on"
            )
        if self.max_survivor_age_steps < (1 if self.bind_pilots else 0):
            raise ConfigError(
                f"max_survivor_age_steps is {self.max_survivor_age_steps}; bound pilots are one step old when "
                "they are used, so it must be at least 1, or set bind_pilots to False"
            )
        check_choices(
            self,
            easy_prompts=("next_epoch", "remove"),
            solved_prompts=("retire", "remove", "next_epoch"),
            survivor_selection=tuple(SURVIVOR_SELECTIONS),
        )

    @property
    def prompts_per_round(self) -> int:
        """Prompts piloted per round."""
        return 3 * self.train_prompts if self.pilot_prompts is None else self.pilot_prompts

    def build(self, pool: PromptPool, rng: np.random.Generator, ledger: Ledger) -> PilotCommitAllocator:
        """The allocator with these settings."""
        return PilotCommitAllocator(self, pool, rng, ledger)


class PilotCommitAllocator:
    """Pilots, triages and commits; keeps the survivors that wait between steps."""

    name = "pilot_commit"

    def __init__(self, settings: PilotCommit, pool: PromptPool, rng: np.random.Generator, ledger: Ledger) -> None:
        self._settings = settings
        self._pool = pool
        self._rng = rng
        self._ledger = ledger
        self._survivors: list[Group] = []
        self._streaks: dict[int, int] = {}  # successes in a row, of prompts that are in the pool
        self._retired: dict[int, int] = {}  # the same of prompts that have retired, in the order in which they did
        self._retired_order: list[int] = []  # its keys, to draw from without a pass over all of them
        self._has_bound_pilots = False  # this step's pilots came with the last step's commits
        self._begin_step()

    def _begin_step(self) -> None:
        self._rounds = 0
        self._piloted: set[int] = set()  # in this step; no prompt is piloted twice with the same policy
        self._chosen: list[Group] | None = None
        self._bound_for_next = False

    def ask(self, step: int, prompts: Sequence[int] | None) -> list[Allotment]:
        """Rounds of pilots until enough prompts survive, then the commits, then nothing."""
        refuse_prompts(prompts, "Pilot-Commit")
        if self._chosen is not None:
            return []
        if self._rounds == 0:
            self._drop_aged(step)
        if pilots := self._pilot_round():
            return pilots
        self._chosen = self._choose_survivors()
        commits = [Allotment(g.prompt, self._settings.commit_rollouts, "commit") for g in self._chosen]
        return commits + self._bound_pilots() if commits else []

    def _drop_aged(self, step: int) -> None:
        limit = self._settings.max_survivor_age_steps
        for group in self._survivors:
            if step - group.birth_step > limit:
                self._ledger.discard(group.rollouts, "aged_out")
        self._survivors = [group for group in self._survivors if step - group.birth_step <= limit]

    def _pilot_round(self) -> list[Allotment]:
        due = self._settings.pilot_every_step and self._rounds == 0 and not self._has_bound_pilots
        short = len(self._survivors) < self._settings.train_prompts
        if not (due or short) or self._rounds == self._settings.max_pilot_rounds:
            return []
        self._rounds += 1
        return self._pilots(busy=self._survivors)

    def _bound_pilots(self) -> list[Allotment]:
        short = len(self._survivors) < self._settings.train_prompts
        if not self._settings.bind_pilots or not (self._settings.pilot_every_step or short):
            return []
        pilots = self._pilots(busy=self._survivors + (self._chosen or []))
        self._bound_for_next = bool(pilots)
        return pilots

    def _pilots(self, busy: list[Group]) -> list[Allotment]:
        exclude = self._piloted | {group.prompt for group in busy}
        rechecked = self._rechecked(exclude)
        drawn = rechecked + self._pool.draw(self._settings.prompts_per_round - len(rechecked), exclude)
        self._piloted.update(drawn)
        return [Allotment(prompt, self._settings.pilot_rollouts, "pilot") for prompt in drawn]

    def _rechecked(self, exclude: set[int]) -> list[int]:
        """Retired prompts to pilot again; the expected number is their share of a round."""
        wanted = self._settings.recheck_share * self._settings.prompts_per_round
        if not self._retired or not (num_draws := min(len(self._retired), int(wanted + self._rng.random()))):
            return []
        places = self._rng.choice(len(self._retired), num_draws, replace=False, shuffle=False)
        drawn = (self._retired_order[i] for i in places)
        return [prompt for prompt in drawn if prompt not in exclude]

    def _choose_survivors(self) -> list[Group]:
        key = SURVIVOR_SELECTIONS[self._settings.survivor_selection]
        shuffled = [self._survivors[i] for i in self._rng.permutation(len(self._survivors))]
        ranked = sorted(shuffled, key=key)
        self._survivors = ranked[self._settings.train_prompts :]
        return ranked[: self._settings.train_prompts]

    def tell(self, step: int, groups: list[tuple[Allotment, Group]]) -> None:
        """Join commits to their pilots; triage the prompts of new pilots."""
        chosen = {group.prompt: group for group in self._chosen or ()}
        for request, group in groups:
            if request.purpose == "commit":
                chosen[group.prompt].join(group)
            else:
                self._triage(group)

    def _triage(self, group: Group) -> None:
        settings = self._settings
        succeeded = outcomes(group.rollouts, settings.success_threshold)
        num_scored, successes = len(succeeded), succeeded.count(True)
        rate = successes / num_scored if num_scored else math.nan
        if settings.solved_prompts == "retire":
            self._count_streak(group.prompt, num_scored, successes)
        if not num_scored:
            outcome = "unscored"
        elif rate >= settings.p_solve:
            outcome = "solved"
            if settings.solved_prompts == "remove":
                self._pool.remove(group.prompt)
        elif rate > settings.p_upper:
            outcome = "too_easy"
            if settings.easy_prompts == "remove":
                self._pool.remove(group.prompt)
        elif rate < settings.p_lower:
            outcome = "too_hard"
        else:
            self._downsample(group)
            self._survivors.append(group)
            return
        self._ledger.discard(group.rollouts, outcome)

    def _count_streak(self, prompt: int, num_scored: int, successes: int) -> None:
        """Retire a prompt after enough successes in a row; one failure brings it back."""
        if successes < num_scored:
            self._streaks.pop(prompt, None)
            if self._retired.pop(prompt, None) is not None:
                self._retired_order.remove(prompt)
                self._pool.restore(prompt)
        elif num_scored and prompt not in self._retired:
            streak = self._streaks.pop(prompt, 0) + num_scored
            if streak < self._settings.retire_rollouts:
                self._streaks[prompt] = streak
            else:
                self._retired[prompt] = streak
                self._retired_order.append(prompt)
                self._pool.remove(prompt)

    def _downsample(self, group: Group) -> None:
        """Leave the pilots of the largest reward variance in the group."""
        num_kept = self._settings.downsample_pilots
        scored = [rollout for rollout in group.rollouts if rollout.is_scored]
        if num_kept is None or len(scored) <= num_kept:
            return
        kept = {id(scored[i]) for i in max_variance_subset([rollout.reward for rollout in scored], num_kept)}
        self._ledger.settle([rollout for rollout in scored if id(rollout) not in kept], "downsampled")
        group.rollouts = [rollout for rollout in group.rollouts if id(rollout) in kept or not rollout.is_scored]

    def take(self, step: int) -> list[Group]:
        """The committed groups, pilots and commits joined; ends the step."""
        chosen, self._has_bound_pilots = self._chosen or [], self._bound_for_next
        self._begin_step()
        return chosen

    @property
    def exhausted(self) -> str | None:
        """Why no prompt is left to pilot, or None."""
        if self._pool.num_live or self._survivors:
            return None
        if self._settings.solved_prompts == "retire":
            return (
                f"all {self._pool.num_prompts} prompts have retired, after {self._settings.retire_rollouts} successful "
                "rollouts in a row each, or were removed as too easy: there is little left to learn from this data "
                "set. Add harder prompts, or keep solved ones in the pool with solved_prompts='next_epoch'"
            )
        return (
            f"all {self._pool.num_prompts} prompts have been removed as solved or too easy: there is nothing "
            "left to learn from this data set. Add harder prompts, or keep solved ones in the pool with "
            "solved_prompts='next_epoch'"
        )

    def waiting(self) -> list[Group]:
        """Survivors that wait for a later step."""
        return self._survivors

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, besides the waiting groups."""
        return {
            "has_bound_pilots": self._has_bound_pilots,
            "prompts": [*self._retired, *self._streaks],
            "streaks": [*self._retired.values(), *self._streaks.values()],
            "num_retired": len(self._retired),
        }

    def restore(self, state: dict[str, Any], waiting: list[Group]) -> None:
        """Go on from a `state_dict()` and the groups that were waiting."""
        self._begin_step()
        self._has_bound_pilots = state["has_bound_pilots"]
        streaks, num_retired = list(zip(state["prompts"], state["streaks"], strict=True)), state["num_retired"]
        self._retired, self._streaks = dict(streaks[:num_retired]), dict(streaks[num_retired:])
        self._retired_order = list(self._retired)
        self._survivors = waiting

    def metrics(self) -> dict[str, float]:
        """Figures for the trainer's log."""
        return {
            "live_prompts": float(self._pool.num_live),
            "epoch": float(self._pool.epoch),
            "retired_prompts": float(self._pool.num_prompts - self._pool.num_live),
            "survivors_waiting": float(len(self._survivors)),
        }


def max_variance_subset(rewards: Sequence[float], num_kept: int) -> list[int]:
    """Positions of the `num_kept` rewards of the largest variance: the i < num_kept smallest and the others largest.

    Source: "Not All Rollouts are Useful", arXiv 2504.13818, section 3.2, for the fact that it is of this form.
    """
    order = np.argsort(rewards, kind="stable")
    choices = [np.concatenate([order[:i], order[len(order) - num_kept + i :]]) for i in range(num_kept)]
    values = np.asarray(rewards, dtype=np.float64)
    best = max(choices, key=lambda positions: float(values[positions].var()))
    return sorted(best.tolist())
