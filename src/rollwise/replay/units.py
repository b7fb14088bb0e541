"""What is stored and drawn as one: single rollouts, or groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rollwise.errors import ConfigError
from rollwise.replay.priority import PRIORITIES, Priority
from rollwise.replay.settings import RECENCY
from rollwise.rollout import Rollout

Unit = Rollout | tuple[Rollout, ...]  # a single rollout stands for itself: a tuple around each would double the reads


def split_units(rollouts: Sequence[Rollout], unit: Literal["rollout", "group"]) -> Sequence[Unit]:
    """Rollouts as units. Where the unit is a group, neighbours of the same prompt are one."""
    if unit == "rollout":
        return rollouts
    return [tuple(members) for _, members in groupby(rollouts, key=attrgetter("prompt_id"))]


def rollouts_of(units: Sequence[Unit]) -> list[Rollout]:
    """The rollouts of some units, all of one kind, in order."""
    if units and isinstance(units[0], tuple):
        return list(chain.from_iterable(cast("Sequence[tuple[Rollout, ...]]", units)))
    return list(cast("Sequence[Rollout]", units))


class Units:
    """Some units, and figures of each.

    Args:
        units: The units, none of them empty, all single rollouts or all groups.

    Attributes:
        units: The units.
        sizes_B: Rollouts in each, shape (B,).
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self._rollouts = rollouts_of(units)
        if units and isinstance(units[0], tuple):
            self.sizes_B = np.array(list(map(len, cast("Sequence[tuple[Rollout, ...]]", units))), dtype=np.int64)
            self._starts_B = np.cumsum(self.sizes_B) - self.sizes_B
        else:
            self.sizes_B = np.ones(len(units), dtype=np.int64)

    def reduce(self, name: str, ufunc: np.ufunc, dtype: DTypeLike) -> NDArray[Any]:
        """Each unit's sum, minimum or the like of its rollouts' attribute `name`, shape (B,)."""
        values = np.fromiter(map(attrgetter(name), self._rollouts), dtype=dtype, count=len(self._rollouts))
        return self._reduced(values, ufunc)

    def own_values(self, priority: str | Priority) -> NDArray[np.float64]:
        """Each unit's own priority: the mean over its rollouts, shape (B,).

        Raises:
            ConfigError: If an advantage or a priority is not finite, or a priority is negative.
        """
        function = priority if callable(priority) else PRIORITIES["uniform" if priority == RECENCY else priority]
        num_rollouts = len(self._rollouts)
        advantages = np.fromiter(map(attrgetter("advantage"), self._rollouts), np.float64, num_rollouts)
        if not np.isfinite(advantages).all():
            bad = self._rollouts[int(np.flatnonzero(~np.isfinite(advantages))[0])]
            raise ConfigError(
                f"the advantage of a rollout of prompt {bad.prompt_id!r} is {bad.advantage}; store rollouts once their "
                "advantages are known, finite numbers, and leave unscored ones out"
            )
        values = np.abs(advantages) if priority == "advantage" else np.asarray(function(self._rollouts), np.float64)
        if values.shape != (num_rollouts,) or not (values >= 0).all() or not np.isfinite(values).all():
            raise ConfigError(
                f"priority {getattr(priority, '__name__', priority)!r} gave {values[:5]}... of shape {values.shape} "
                f"for {len(self._rollouts)} rollouts; it must give one finite number of at least 0 for each"
            )
        means_B: NDArray[np.float64] = self._reduced(values, np.add) / self.sizes_B
        return means_B

    def means_of_given(self, given: Mapping[int, float]) -> NDArray[np.float64]:
        """Each unit's mean over those of its rollouts whose `id` has a number in `given`; NaN if none has."""
        values = np.array([given.get(key, math.nan) for key in map(id, self._rollouts)], dtype=np.float64)
        if len(values) == len(self.units):
            return values
        is_given = ~np.isnan(values)
        counts_B = self._reduced(is_given.astype(np.int64), np.add)
        sums_B = self._reduced(np.where(is_given, values, 0.0), np.add)
        with np.errstate(invalid="ignore"):
            means_B: NDArray[np.float64] = sums_B / counts_B
        return means_B

    def _reduced(self, values: NDArray[Any], ufunc: np.ufunc) -> NDArray[Any]:
        return values if len(values) == len(self.units) else ufunc.reduceat(values, self._starts_B)
