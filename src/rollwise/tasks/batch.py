"""A batch of environments that take their turns together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollwise.errors import ConfigError, ProtocolError
from rollwise.tasks.environment import LanguageEnvironment, Observation, Turn

__all__ = ["BatchTurn", "EnvironmentBatch"]


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

    Environments are made when first needed and used again for later batches.

    Args:
        make: Makes one environment, for example `lambda: FrozenLake(slippery=True)`.
    """

    def __init__(self, make: Callable[[], LanguageEnvironment]) -> None:
        self._make = make
        self._environments: list[LanguageEnvironment] = []
        self._turns: list[list[Turn]] = []
        self._first: list[Observation] = []

    def reset(self, specs: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[Observation]:
        """Start one episode for each spec.

        Args:
            specs: The levels.
            seeds: Seed of each episode's chance; different ones for the rollouts of a group.

        Returns:
            The first observations.

        Raises:
            ConfigError: A spec is not one of these environments, or there are not as many seeds as specs.
        """
        if len(specs) != len(seeds):
            raise ConfigError(f"{len(specs)} specs but {len(seeds)} seeds; give each episode one of both")
        while len(self._environments) < len(specs):
            self._environments.append(self._make())
        self._turns = [[] for _ in specs]
        self._first = [
            environment.begin(spec, seed)
            for environment, spec, seed in zip(self._environments, specs, seeds, strict=False)
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
        rewards: list[float | None] = [0.0] * len(actions)
        for i, (turns, action) in enumerate(zip(self._turns, actions, strict=True)):
            if turns and turns[-1].done:
                continue
            if action is None:
                raise ProtocolError(f"episode {i} is not over and needs an action")
            turns.append(self._environments[i].take_turn(action))
            rewards[i] = turns[-1].reward
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
        """Close the environments."""
        for environment in self._environments:
            environment.close()
        self._environments = []
