"""A simulated run: one allocation, one pool of prompts, one seed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollwise.allocation import ALLOCATIONS, Allocation
from rollwise.errors import ConfigError
from rollwise.simulation.engines import CountedEngine, Engine, SchedulerEngine
from rollwise.simulation.policy import SimulatedPolicy

EngineName = Literal["auto", "scheduler", "counted"]
Ending = Literal["target", "budget", "steps", "exhausted", "patience"]

#: Runs that may generate more rollouts than this are played by counts.
SCHEDULER_ROLLOUTS = 200_000

_ENGINES: dict[str, type[SchedulerEngine] | type[CountedEngine]] = {
    "scheduler": SchedulerEngine,
    "counted": CountedEngine,
}
#: Fields of allocations that split a group in two: first and second part.
_SPLITS = (("pilot_rollouts", "commit_rollouts"), ("first_rollouts", "second_rollouts"))


@dataclass(frozen=True)
class SimulatedRun:
    """What a simulated run cost and achieved. Arrays have one entry per step, the first for the start: shape (S + 1,).

    Attributes:
        seed: Its seed.
        engine: `scheduler` or `counted`.
        ended: Why it ended: `target`, `budget`, `steps`, `exhausted` (no prompt is left) or `patience` (no gradient).
        stop_reason: The scheduler's message where it ended the run, else None.
        outcomes: Generated rollouts by outcome, as in the ledger.
        epochs: Passes over the pool that were begun.
        live_prompts: Prompts that were not removed.
        rollouts: Rollouts generated so far, after each step.
        trained: Rollouts so far that reached a gradient.
        groups: Groups so far that reached a gradient.
        success: Mean success rate of the whole pool after each step.
        skill: Logits gained.
    """

    seed: int
    engine: str
    ended: Ending
    stop_reason: str | None
    outcomes: Mapping[str, int]
    epochs: int
    live_prompts: int
    rollouts: NDArray[np.int64]
    trained: NDArray[np.int64]
    groups: NDArray[np.int64]
    success: NDArray[np.float64]
    skill: NDArray[np.float64]

    @property
    def steps(self) -> int:
        """Steps played."""
        return len(self.rollouts) - 1

    @property
    def rollouts_generated(self) -> int:
        """All rollouts."""
        return int(self.rollouts[-1])

    def rollouts_to(self, target: float) -> int | None:
        """Rollouts generated up to the first step after which the mean success is at least `target`; None: never."""
        reached = np.flatnonzero(self.success >= target)
        return int(self.rollouts[reached[0]]) if len(reached) else None


def build_allocation(
    name: str, settings: Mapping[str, Any] | None = None, *, train_prompts: int = 128, group_size: int = 16
) -> Allocation:
    """An allocation by name, sized for groups of `group_size`.

    Args:
        name: A key of `rollwise.allocation.ALLOCATIONS`.
        settings: Fields of it; they override what follows from the other arguments.
        train_prompts: Prompts trained on per step.
        group_size: Rollouts of a trained group. Where an allocation makes them in two parts (pilots and commits), the
            first part is a quarter, at least 2, and the second the rest.

    Raises:
        ConfigError: There is no such allocation or field, or a value is out of its bounds.
    """
    if name not in ALLOCATIONS:
        raise ConfigError(f"allocation is {name!r}; it must be one of {', '.join(ALLOCATIONS)}")
    kind = cast("Any", ALLOCATIONS)[name]
    known = [field.name for field in fields(kind)]
    given = dict(settings or {})
    for field in given:
        if field not in known:
            close = difflib.get_close_matches(field, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known)}"
            raise ConfigError(f"allocation {name!r} has no setting {field!r}{hint}")
    sized: dict[str, Any] = {"train_prompts": train_prompts, "num_rollouts": group_size}
    for first, second in _SPLITS:
        part = given.get(first, max(2, group_size // 4))
        if first in known and second not in given and part >= group_size:
            raise ConfigError(f"{first} is {part} of groups of {group_size}; leave at least 1 for {second}, or set it")
        sized |= {first: part, second: group_size - part}
    try:
        allocation: Allocation = kind(**({field: sized[field] for field in sized if field in known} | given))
    except TypeError as error:
        raise ConfigError(f"allocation {name!r}: {error}; give numbers where its settings are numbers") from error
    return allocation


def simulate(
    allocation: Allocation,
    rates_P: ArrayLike,
    *,
    seed: int = 0,
    steps: int | None = None,
    budget_rollouts: int | None = None,
    target: float | None = None,
    gain_per_group: float = 1e-4,
    critical_groups: float | None = None,
    forgetting: float = 0.0,
    patience_prompts: int = 1000,
    engine: EngineName = "auto",
    progress: Callable[[float], None] | None = None,
) -> SimulatedRun:
    """Play a run until the first of: its target, its budget, its last step, or the scheduler's stop reason.

    Args:
        allocation: Who gets rollouts.
        rates_P: Success rate of each prompt at the start, shape (P,).
        seed: Seed of decisions and rewards.
        steps: Most steps.
        budget_rollouts: Stop after the step in which so many rollouts were generated.
        target: Stop once the mean success rate is at least this.
        gain_per_group: See `SimulatedPolicy`.
        critical_groups: See `SimulatedPolicy`.
        forgetting: See `SimulatedPolicy`.
        patience_prompts: See `RolloutScheduler`; 0: never.
        engine: `scheduler`, `counted`, or `auto`: the scheduler unless the run may generate more than
            `SCHEDULER_ROLLOUTS` rollouts, as the first step's cost says where there is no budget.
        progress: Called now and then with the share of the run that is done, in [0, 1].

    Raises:
        ConfigError: Neither steps nor a budget is given, or a setting is out of its bounds.
    """
    for name, bound in (("steps", steps), ("budget_rollouts", budget_rollouts)):
        if bound is not None and bound < 1:
            raise ConfigError(f"{name} is {bound}; it must be at least 1")
    if steps is None and budget_rollouts is None:
        raise ConfigError("steps and budget_rollouts are both missing; give one, or the run has no end")
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"target is {target}; it must be a mean success rate above 0 and up to 1")
    if engine not in ("auto", *_ENGINES):
        raise ConfigError(f"engine is {engine!r}; it must be one of auto, {', '.join(_ENGINES)}")

    policy = SimulatedPolicy(
        rates_P, gain_per_group=gain_per_group, critical_groups=critical_groups, forgetting=forgetting, seed=seed
    )
    if engine == "auto":
        most = _most_rollouts(allocation, policy.num_prompts, steps, budget_rollouts)
        engine = "counted" if most > SCHEDULER_ROLLOUTS else "scheduler"
    player: Engine = _ENGINES[engine](allocation, policy.num_prompts, seed=seed, patience_prompts=patience_prompts)

    totals = [(0, 0, 0)]
    success, skill = [policy.mean_success()], [policy.skill]
    ended: Ending | None = "target" if target is not None and success[0] >= target else None
    while ended is None:
        step = player.play(policy)
        policy.train(step.group_means)
        generated, trained, groups = totals[-1]
        totals.append((generated + step.generated, trained + step.trained, groups + len(step.group_means)))
        success.append(policy.mean_success())
        skill.append(policy.skill)
        if target is not None and success[-1] >= target:
            ended = "target"
        elif player.stop_reason is not None:
            ended = "exhausted" if player.exhausted is not None else "patience"
        elif budget_rollouts is not None and totals[-1][0] >= budget_rollouts:
            ended = "budget"
        elif (steps is not None and len(totals) > steps) or not step.generated:
            ended = "steps"
        if progress is not None:
            done = totals[-1][0] / (budget_rollouts or math.inf), (len(totals) - 1) / (steps or math.inf)
            progress(1.0 if ended is not None else max(done))
    counts = np.array(totals, dtype=np.int64)
    return SimulatedRun(
        seed=seed,
        engine=engine,
        ended=ended,
        stop_reason=player.stop_reason,
        outcomes=player.ledger.by_outcome(),
        epochs=player.pool.epoch,
        live_prompts=player.pool.num_live,
        rollouts=counts[:, 0],
        trained=counts[:, 1],
        groups=counts[:, 2],
        success=np.array(success),
        skill=np.array(skill),
    )


def _most_rollouts(allocation: Allocation, num_prompts: int, steps: int | None, budget: int | None) -> float:
    """About how many rollouts a run may generate: its budget, or its steps times the rollouts of the first one."""
    if budget is not None:
        return budget
    probe = CountedEngine(allocation, num_prompts, seed=0, patience_prompts=0)
    coins = SimulatedPolicy(np.full(num_prompts, 0.5))
    return (steps or 0) * probe.play(coins).generated
