"""One step of training, with a simulated policy in place of the model: by the real scheduler, or by counts.

Both engines ask the real allocator which prompts get rollouts, tell it what came out, and take from it what is trained
on. With the same seed they make the same run, number for number; a test holds them to that for every allocation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from rollwise.allocation import Allocation, PromptPool
from rollwise.ledger import OUTCOMES, PENDING, TRAINED, Ledger
from rollwise.patience import Patience
from rollwise.rollout import Allotment, Group, Rollout
from rollwise.scheduler import RolloutScheduler
from rollwise.simulation.policy import SimulatedPolicy


class Step(NamedTuple):
    """What a step made: rollouts generated, rollouts trained on, and the share of successes per trained group."""

    generated: int
    trained: int
    group_means: list[float]


class Engine(Protocol):
    """Plays steps of a run."""

    pool: PromptPool
    ledger: Ledger

    def play(self, policy: SimulatedPolicy) -> Step:
        """Generate a step's rollouts. The policy is not trained on them here."""

    @property
    def exhausted(self) -> str | None:
        """Why no prompt is left, or None."""

    @property
    def stop_reason(self) -> str | None:
        """Why the run should end, or None: exhaustion, or too many prompts in a row without a gradient."""


class SchedulerEngine:
    """The real `RolloutScheduler` with a `Rollout` for every rollout: a few microseconds each.

    Args:
        allocation: Who gets rollouts.
        num_prompts: P.
        seed: Seed of the scheduler.
        patience_prompts: See `RolloutScheduler`.
    """

    def __init__(self, allocation: Allocation, num_prompts: int, *, seed: int, patience_prompts: int) -> None:
        self._scheduler = RolloutScheduler(
            range(num_prompts), allocation=allocation, seed=seed, patience_prompts=patience_prompts
        )
        self.pool, self.ledger = self._scheduler.pool, self._scheduler.ledger

    def play(self, policy: SimulatedPolicy) -> Step:
        """Ask and tell until the batch is complete. The successes of a request come before its failures."""
        generated = 0
        while requests := self._scheduler.ask():
            sizes = [request.num_rollouts for request in requests]
            prompts = [int(request.prompt_id) for request in requests]
            rollouts = [
                Rollout(prompt, float(i < successes), num_tokens=1)
                for prompt, size, successes in zip(prompts, sizes, policy.successes(prompts, sizes), strict=True)
                for i in range(size)
            ]
            self._scheduler.tell(rollouts)
            generated += len(rollouts)
        batch = self._scheduler.batch()
        means = {row.rollout.prompt_id: row.rollout.group_mean for row in batch.rows}
        return Step(generated, len(batch.rows), list(means.values()))

    @property
    def exhausted(self) -> str | None:
        """Why no prompt is left, or None."""
        return self._scheduler.allocator.exhausted

    @property
    def stop_reason(self) -> str | None:
        """The scheduler's."""
        return self._scheduler.stop_reason


class _TotalsLedger(Ledger):
    """A ledger of totals by outcome: it counts rollouts and does not look at them."""

    def __init__(self) -> None:
        super().__init__()
        self._totals = dict.fromkeys(OUTCOMES, 0)

    def add(self, num_rollouts: int) -> None:
        self._totals[PENDING] += num_rollouts

    def settle(self, rollouts: Iterable[Rollout], outcome: str) -> None:
        if rollouts := rollouts if isinstance(rollouts, list) else list(rollouts):
            self._totals[PENDING] -= len(rollouts)
            self._totals[outcome] += len(rollouts)

    def discard(self, rollouts: Sequence[Rollout], outcome: str) -> None:
        self.settle(rollouts, outcome)  # all are scored

    def by_outcome(self) -> dict[str, int]:
        return dict(self._totals)


class _Shared(Rollout):
    """A rollout of many groups; its reward is a number, which is not asked again and again."""

    is_scored = True


class CountedEngine:
    """The real allocator, fed with shared rollouts: well under a microsecond each.

    An allocator looks at nothing but the rewards of a group's rollouts, and these are 0 or 1. So all groups share the
    same few rollouts, k that succeeded and n - k that failed: different objects within a group, the same in different
    groups, and all groups of the same n and k the same list of them. What the scheduler does with single rollouts
    (birth steps, advantages, the ledger) is done with k and n.

    Args:
        allocation: As for `SchedulerEngine`, like the rest.
        num_prompts: P.
        seed: Seed of the allocator.
        patience_prompts: See `RolloutScheduler`.
    """

    def __init__(self, allocation: Allocation, num_prompts: int, *, seed: int, patience_prompts: int) -> None:
        rng = np.random.default_rng(seed)
        self._totals = _TotalsLedger()
        self.ledger: Ledger = self._totals
        self.pool = PromptPool(num_prompts, rng)
        self._allocator = allocation.build(self.pool, rng, self.ledger)
        self._patience = Patience(patience_prompts, 1.0) if patience_prompts else None
        self._shared: dict[tuple[str, int], tuple[list[Rollout], list[Rollout]]] = {}
        self._lists: dict[tuple[str, int, int, int], list[Rollout]] = {}
        self._step = -1

    def play(self, policy: SimulatedPolicy) -> Step:
        """Ask and tell the allocator until the batch is complete."""
        self._step += 1
        told: list[tuple[Allotment, int]] = []
        round_ = 0
        while requests := self._allocator.ask(self._step, None):
            sizes = [request.num_rollouts for request in requests]
            found = policy.successes([request.prompt for request in requests], sizes)
            told += zip(requests, found, strict=True)
            self._totals.add(sum(sizes))
            groups = [
                (request, Group(request.prompt, self._step, self._rollouts(request, successes, round_)))
                for request, successes in zip(requests, found, strict=True)
            ]
            self._allocator.tell(self._step, groups)
            round_ += 1
        trained, means = self._train(self._allocator.take(self._step))
        if self._patience is not None:
            self._patience.observe([] if trained else _as_rollouts(told), bool(trained))
        return Step(sum(request.num_rollouts for request, _ in told), trained, means)

    def _rollouts(self, request: Allotment, successes: int, round_: int) -> list[Rollout]:
        """Shared rollouts: others for each purpose and round, as they may come together in one group."""
        key = (request.purpose, round_, request.num_rollouts, successes)
        if (known := self._lists.get(key)) is not None:
            return known
        good, bad = self._shared.setdefault((request.purpose, round_), ([], []))
        for rollouts, reward in ((good, 1.0), (bad, 0.0)):
            while len(rollouts) < request.num_rollouts:
                rollouts.append(_Shared(0, reward, num_tokens=1, purpose=request.purpose))
        self._lists[key] = good[:successes] + bad[: request.num_rollouts - successes]
        return self._lists[key]

    def _train(self, groups: Sequence[Group]) -> tuple[int, list[float]]:
        """Settle the groups that are trained on; return the rollouts with a gradient and the means of their groups."""
        trained, means = 0, []
        for group in groups:
            size = len(group.rollouts)
            mean = sum([rollout.reward for rollout in group.rollouts]) / size
            has_variance = 0 < mean < 1
            self.ledger.settle(group.rollouts, TRAINED if has_variance else "zero_variance")
            if has_variance:
                trained += size
                means.append(mean)
        return trained, means

    @property
    def exhausted(self) -> str | None:
        """Why no prompt is left, or None."""
        return self._allocator.exhausted

    @property
    def stop_reason(self) -> str | None:
        """As the scheduler's."""
        return self._allocator.exhausted or (self._patience.stop_reason if self._patience is not None else None)


def _as_rollouts(told: Sequence[tuple[Allotment, int]]) -> list[Rollout]:
    return [
        Rollout(request.prompt, float(i < successes), num_tokens=1)
        for request, successes in told
        for i in range(request.num_rollouts)
    ]
