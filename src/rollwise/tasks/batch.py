"""A batch of environments that take their turns together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rollwise.errors import ConfigError, ProtocolError
from rollwise.tasks.environment import LanguageEnvironment, Observation, Turn
from rollwise.tasks.hosts import Host, InProcessHost, KillableHost, check_importable
from rollwise.tasks.levels import make_environment

__all__ = ["BatchTurn", "EnvironmentBatch"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class BatchTurn:
    """One turn of every environment; the lists are parallel to the batch.

    Attributes:
        observations: What each model is shown next; of a finished episode, the last one.
        rewards: Reward of this turn; 0.0 for an episode that was over before, None for one that became unscored.
        done: Whether each episode is over.
        unscored: Why an episode is unscored, from the turn on in which that came out; None for all others.
    """

    observations: list[Observation]
    rewards: list[float | None]
    done: list[bool]
    unscored: list[str | None]


class EnvironmentBatch:
    """Environments of one kind, stepped together; those whose episode is over wait for the others.

    Quick environments live in this process. Those that `may_hang` live in `num_processes` others, which work side by
    side; an episode that takes too long ends as unscored when its process is killed, and the rest goes on.
    Environments are made when first needed and used again for later batches.

    Args:
        environment: A name of `rollwise.tasks.levels.ENVIRONMENTS`, `my_module:MyClass`, a class, or a function that
            makes one environment.
        settings: Settings of the environments, for example `{"slippery": True}`; a function gets them, too.
        num_processes: How many processes run environments that may hang.

    Raises:
        ConfigError: No such environment or setting, or one that may hang but cannot be imported elsewhere.
        VersionError: A package that the environment needs is not installed.
    """

    def __init__(
        self,
        environment: str | Callable[..., LanguageEnvironment],
        settings: Mapping[str, Any] | None = None,
        *,
        num_processes: int = 4,
    ) -> None:
        if num_processes < 1:
            raise ConfigError(f"num_processes is {num_processes}; it must be at least 1")
        settings = dict(settings or {})
        make = partial(environment if callable(environment) else partial(make_environment, environment), **settings)
        one = make()  # a wrong name or setting is said now
        one.close()
        self._hosts: list[Host] = [InProcessHost(make)]
        if one.may_hang:
            name = environment
            if isinstance(name, type):
                name = f"{name.__module__}:{name.__qualname__}"
            if not isinstance(name, str):
                raise ConfigError(
                    f"{type(one).__name__} may hang and so needs a process of its own, which a function cannot go to: "
                    "give its class, its name, or set may_hang = False in the class if every step is quick"
                )
            check_importable(type(one), settings)
            self._hosts = [KillableHost(name, settings, one.timeout_seconds) for _ in range(num_processes)]
        self._turns: list[list[Turn]] = []
        self._first: list[Observation] = []

    def reset(self, specs: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[Observation]:
        """Start one episode for each spec.

        Args:
            specs: The levels.
            seeds: Seed of each episode's chance; different ones for the rollouts of a group.

        Returns:
            The first observations. An episode that cannot begin is over and unscored.

        Raises:
            ConfigError: A spec is not one of these environments, or there are not as many seeds as specs.
        """
        if len(specs) != len(seeds):
            raise ConfigError(f"{len(specs)} specs but {len(seeds)} seeds; give each episode one of both")
        begun = self._everywhere(lambda host, i: host.begin(i, specs[i], int(seeds[i])), range(len(specs)))
        self._first = [Observation("") if isinstance(first, str) else first for first in begun]
        self._turns = [
            [Turn(Observation(""), None, truncated=True, unscored=first)] if isinstance(first, str) else []
            for first in begun
        ]
        return list(self._first)

    def step(self, actions: Sequence[str | None]) -> BatchTurn:
        """Take one turn in every environment whose episode is not over.

        Args:
            actions: The models' answers, one per environment; of a finished episode it is not looked at, None will do.

        Raises:
            ProtocolError: `reset` has not been called, or an episode that is not over has no action.
            ConfigError: There are not as many actions as environments.
        """
        if not self._turns:
            raise ProtocolError("no episode has begun: call reset() first")
        if len(actions) != len(self._turns):
            raise ConfigError(f"{len(actions)} actions but {len(self._turns)} environments; give one each, or None")
        answers = {i: action for i, action in enumerate(actions) if not (self._turns[i] and self._turns[i][-1].done)}
        missing = [i for i, action in answers.items() if action is None]
        if missing:
            raise ProtocolError(f"episode {missing[0]} is not over and needs an action")
        rewards: list[float | None] = [0.0] * len(actions)
        turns = self._everywhere(lambda host, i: host.take_turn(i, answers[i] or ""), list(answers))
        for i, turn in zip(answers, turns, strict=True):
            self._turns[i].append(turn)
            rewards[i] = turn.reward
        return BatchTurn(self.observations, rewards, self.done, self.unscored)

    @property
    def observations(self) -> list[Observation]:
        """The latest observation of each episode."""
        return [
            turns[-1].observation if turns else first for turns, first in zip(self._turns, self._first, strict=True)
        ]

    @property
    def done(self) -> list[bool]:
        """Whether each episode is over."""
        return [bool(turns) and turns[-1].done for turns in self._turns]

    @property
    def unscored(self) -> list[str | None]:
        """Why each episode is unscored; None where it is not."""
        return [turns[-1].unscored if turns else None for turns in self._turns]

    @property
    def returns(self) -> list[float | None]:
        """Sum of each episode's rewards so far; None where it is unscored."""
        totals: list[float | None] = []
        for turns in self._turns:
            rewards = [turn.reward for turn in turns]
            totals.append(None if None in rewards else math.fsum(r for r in rewards if r is not None))
        return totals

    @property
    def turns(self) -> list[list[Turn]]:
        """Every turn of each episode so far."""
        return [list(turns) for turns in self._turns]

    def close(self) -> None:
        """Let go of the environments and their processes."""
        for host in self._hosts:
            host.close()

    def _everywhere(self, do: Callable[[Host, int], _Result], episodes: Sequence[int]) -> list[_Result]:
        """Do something with every episode, at each host one after the other and at all hosts together."""
        num_hosts = len(self._hosts)
        if num_hosts == 1:
            return [do(self._hosts[0], i) for i in episodes]

        def do_there(number: int) -> dict[int, _Result]:
            return {i: do(self._hosts[number], i) for i in episodes if i % num_hosts == number}

        with ThreadPoolExecutor(num_hosts) as pool:
            results = {i: result for there in pool.map(do_there, range(num_hosts)) for i, result in there.items()}
        return [results[i] for i in episodes]
