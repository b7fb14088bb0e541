"""The prompts of a run by their stable ids, and where they are in another run's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollwise.errors import ConfigError, RolloutError, StateError
from rollwise.rollout import PromptId


class PromptIds:
    """Unique ids, each with its position.

    Args:
        ids: The ids, all int or all str.

    Attributes:
        ids: The ids in order; numpy's scalars as Python's, so that a saved state can be read without numpy.

    Raises:
        ConfigError: If there are none, or they repeat or mix int and str.
    """

    def __init__(self, ids: Sequence[PromptId]) -> None:
        self.ids: list[PromptId] = [i.item() if isinstance(i, np.generic) else i for i in ids]
        self._positions = {prompt_id: i for i, prompt_id in enumerate(self.ids)}
        if not self.ids:
            raise ConfigError("there are no prompts; give at least one prompt id")
        if not any(all(isinstance(i, kind) for i in self.ids) for kind in (int, str)):
            kinds = sorted({type(i).__name__ for i in self.ids})
            raise ConfigError(f"prompt ids are of the types {kinds}; make them all int or all str")
        if len(self._positions) < len(self.ids):
            repeated = len(self.ids) - len(self._positions)
            raise ConfigError(f"{repeated} of {len(self.ids)} prompt ids repeat; make them unique")

    def position(self, prompt_id: PromptId) -> int:
        """Where a prompt is.

        Raises:
            RolloutError: If there is no such id.
        """
        try:
            return self._positions[prompt_id]
        except KeyError:
            raise RolloutError(
                f"prompt id {prompt_id!r} is unknown; give one of the {len(self.ids)} that the scheduler was built with"
            ) from None

    def state(self) -> list[PromptId] | int:
        """The ids, JSON-able: their number alone where they are row numbers."""
        return len(self.ids) if self.ids == list(range(len(self.ids))) else self.ids

    def positions_of(self, saved: list[PromptId] | int) -> list[int] | None:
        """Where the prompts of a `state()` are here, in its order; None if they are the same in the same order.

        Raises:
            StateError: If some of them are not here.
        """
        ids: list[PromptId] = list(range(saved)) if isinstance(saved, int) else saved
        if ids == self.ids:
            return None
        vanished = [prompt_id for prompt_id in ids if prompt_id not in self._positions]
        if vanished:
            raise StateError(
                f"{len(vanished)} of the {len(ids)} prompts of the saved state are not among the "
                f"{len(self.ids)} of this run, such as {vanished[0]!r}; resume with a data set that still has "
                "them (it may have more, in any order)"
            )
        return [self._positions[prompt_id] for prompt_id in ids]


def moved(state: dict[str, Any], positions: list[int]) -> dict[str, Any]:
    """A scheduler's saved state with each prompt's position replaced by the one it has now."""
    pool, allocation = state["pool"], state["allocation"]
    at = positions.__getitem__
    moved_pool = pool | {name: list(map(at, pool[name])) for name in ("removed", "queue")}
    waiting = [[at(prompt), *rest] for prompt, *rest in state["waiting"]]
    if "prompts" in allocation:  # what an allocator keeps by prompt is in the order of these
        allocation = allocation | {"prompts": list(map(at, allocation["prompts"]))}
    return state | {"pool": moved_pool, "waiting": waiting, "allocation": allocation}
