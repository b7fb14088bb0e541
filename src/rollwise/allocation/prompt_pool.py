"""The prompts that may still be drawn, epoch by epoch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from rollwise.errors import StateError


class PromptPool:
    """Draws prompts without repetition within an epoch, in an order shuffled anew for each epoch.

    Prompts are positions 0..P-1. A removed prompt is not drawn again until it is restored. A prompt that has to wait
    for the next epoch (too easy, too hard) needs no bookkeeping: every prompt is drawn at most once per epoch.

    Args:
        num_prompts: P.
        rng: Source of the order; shared with the rest of the scheduler.
    """

    def __init__(self, num_prompts: int, rng: np.random.Generator) -> None:
        self.num_prompts = num_prompts
        self.epoch = 0
        self._rng = rng
        self._removed: set[int] = set()
        self._is_live_P = np.ones(num_prompts, dtype=bool)  # the same as an array, for the turn of an epoch
        self._queue: list[int] = []  # what is left of this epoch; the next prompt is the last element

    @property
    def num_live(self) -> int:
        """Prompts that have not been removed."""
        return self.num_prompts - len(self._removed)

    def remove(self, prompt: int) -> None:
        """Take a prompt out for good."""
        self._removed.add(prompt)
        self._is_live_P[prompt] = False

    @property
    def removed(self) -> list[int]:
        """Prompts that have been removed, in ascending order."""
        return sorted(self._removed)

    def restore(self, prompt: int) -> None:
        """Bring a removed prompt back: at once if its turn in this epoch is still to come, else in the next epoch."""
        self._removed.discard(prompt)
        self._is_live_P[prompt] = True

    def add(self, prompts: Sequence[int]) -> None:
        """Let prompts that are new have their turn in this epoch, each at a random place of what is left of it."""
        if prompts:
            places = self._rng.integers(0, len(self._queue) + 1, len(prompts))
            self._queue = [int(p) for p in np.insert(np.array(self._queue, dtype=np.int64), places, prompts)]

    def draw(self, num_prompts: int, exclude: Collection[int] = ()) -> list[int]:
        """Draw up to `num_prompts` different live prompts, none of them in `exclude`.

        Goes on into the next epoch when this one runs out. Excluded prompts keep their place, but for those
        that are left when an epoch ends: their next turn is in the new one. Returns fewer only if the pool holds
        no more.
        """
        drawn: list[int] = []
        unavailable = set(exclude)
        for _ in range(2):  # what is left of this epoch, then at most one more
            passed_over: list[int] = []
            while self._queue and len(drawn) < num_prompts:
                prompt = self._queue.pop()
                if prompt in self._removed:
                    continue
                if prompt in unavailable:
                    passed_over.append(prompt)
                    continue
                drawn.append(prompt)
                unavailable.add(prompt)
            self._queue += reversed(passed_over)
            if len(drawn) == num_prompts or self.num_live <= len(unavailable - self._removed):
                break
            # Only prompts that must not be drawn now are left of this epoch: they come again in the next.
            order_P = self._rng.permutation(self.num_prompts)
            self._queue = order_P[self._is_live_P[order_P]].tolist()
            self.epoch += 1
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to draw the same prompts again, given the generator's state."""
        return {
            "num_prompts": self.num_prompts,
            "epoch": self.epoch,
            "removed": sorted(self._removed),
            "queue": list(self._queue),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`, of this many prompts or fewer.

        Raises:
            StateError: If it was made for more prompts.
        """
        if state["num_prompts"] > self.num_prompts:
            raise StateError(
                f"the saved state is of {state['num_prompts']} prompts, this run has {self.num_prompts}; "
                "resume with a data set that still has those that the run was started with"
            )
        self.epoch = state["epoch"]
        self._removed = set(state["removed"])
        self._is_live_P[:] = True
        self._is_live_P[state["removed"]] = False
        self._queue = list(state["queue"])
