"""The replay buffer: single rollouts, drawn by |advantage| and freshness, each for a bounded number of steps.

Source: "Rollout-Level Advantage-Prioritized Experience Replay for GRPO", arXiv 2606.04560, for the priority and
the age bound; "Freshness-Aware Prioritized Experience Replay", arXiv 2604.16918, for the exponential decay.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwise.errors import ConfigError, StateError
from rollwise.replay.priority_index import PriorityIndex
from rollwise.rollout import Rollout

_SPARE_SLOTS = 1024


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Settings of replay. The defaults are those of arXiv 2606.04560.

    Attributes:
        ratio: Replayed rows per fresh row that carries a gradient (r).
        alpha: Exponent of the priority; 0 draws uniformly.
        epsilon: Added to |advantage|, so that no stored rollout has priority 0.
        max_age_steps: Rollouts older than this are never drawn; None: no bound.
        decay_tau_steps: Priorities decay as exp(-age / tau) before alpha is applied; None: no decay.
        warmup_steps: Steps at the start of the run without replay; the buffer fills meanwhile.
        capacity_rollouts: The buffer holds at most this many rollouts; the oldest go first.
        capacity_bytes: The payloads it holds are at most this large together; the oldest go first.
    """

    ratio: float = 0.5
    alpha: float = 0.5
    epsilon: float = 1e-6
    max_age_steps: int | None = 10
    decay_tau_steps: float | None = None
    warmup_steps: int = 20
    capacity_rollouts: int = 30_000
    capacity_bytes: int = 2 * 1024**3

    def __post_init__(self) -> None:
        for name in ("ratio", "alpha", "epsilon", "warmup_steps"):
            if not (getattr(self, name) >= 0 and np.isfinite(getattr(self, name))):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be finite and at least 0")
        for name in ("capacity_rollouts", "capacity_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_age_steps is not None and self.max_age_steps < 1:
            raise ConfigError(
                f"max_age_steps is {self.max_age_steps}; a stored rollout is at least one step old when it is "
                "drawn, so it must be at least 1 (None: no bound; ratio 0: no replay)"
            )
        if self.decay_tau_steps is not None and not self.decay_tau_steps > 0:
            raise ConfigError(f"decay_tau_steps is {self.decay_tau_steps}; it must be above 0 (None: no decay)")


class ReplayBuffer:
    """Rollouts with time-invariant log priorities.

    With `base_i = |A_i| + epsilon`, the probability to be drawn at step t is

        P(i) ∝ (base_i * exp(-(t - birth_i) / tau))^alpha

    The factor exp(-alpha t / tau) is common to all rollouts, so the key

        log_key_i = alpha * (log base_i + birth_i / tau)

    never changes and gives the same distribution: nothing has to be refreshed as rollouts age.

    Rollouts lie in slots, in the order of insertion. Those that leave, leave holes; when more than about half of the
    slots are holes, the rest moves together. So a step costs time for what enters, leaves and is drawn.

    Args:
        settings: See `Replay`.
    """

    def __init__(self, settings: Replay) -> None:
        self.settings = settings
        self._index = PriorityIndex()  # slot -> log key; the arrays below are as long
        self._rollouts_N: NDArray[np.object_] = np.empty(0, dtype=object)  # None in a hole
        self._nbytes_N = np.empty(0, dtype=np.int64)
        self._next_slot = 0
        self._num_held = 0
        self._nbytes_held = 0
        # Births come out of order where a group is completed late, so age is not a matter of slots.
        self._slots_of_birth: dict[int, deque[NDArray[np.int64]]] = {}  # birth step -> slots, first inserted first
        self._births: list[int] = []  # its keys, as a heap

    def __len__(self) -> int:
        return self._num_held

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads held."""
        return self._nbytes_held

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts held, oldest insertion first."""
        rollouts: list[Rollout] = self._rollouts_N[self._held_slots()].tolist()
        return rollouts

    def log_keys(self, advantages_B: NDArray[np.float64], births_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """`alpha * (log(|A| + epsilon) + birth / tau)`, shape (B,); -inf where |A| + epsilon is 0."""
        settings = self.settings
        with np.errstate(divide="ignore"):
            log_base_B = np.log(np.abs(advantages_B) + settings.epsilon)
        # 0 * -inf is undefined; alpha 0 means uniform over whatever can be drawn at all.
        keys_B = settings.alpha * log_base_B if settings.alpha else np.where(np.isneginf(log_base_B), -np.inf, 0)
        if settings.decay_tau_steps is not None:
            keys_B = keys_B + settings.alpha * births_B / settings.decay_tau_steps
        return keys_B

    def insert(self, rollouts: Sequence[Rollout]) -> None:
        """Store rollouts with their advantages and birth steps as they are now."""
        self._put(rollouts, None)
        self._trim_to_capacity()

    def evict(self, step: int) -> None:
        """Drop what is older than the age bound at `step`."""
        if self.settings.max_age_steps is None:
            return
        while self._births and step - self._births[0] > self.settings.max_age_steps:
            for slots in self._slots_of_birth.pop(heapq.heappop(self._births)):
                self._drop(slots)

    def draw(self, num_rollouts: int, step: int, rng: np.random.Generator) -> list[Rollout]:
        """Draw different rollouts, none older than the age bound at `step`; fewer if fewer are held."""
        self.evict(step)
        drawn: list[Rollout] = self._rollouts_N[self._index.draw(num_rollouts, rng)].tolist()
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """What decides the draws to come beyond `rollouts`, JSON-able: their slots, as runs [first, length]."""
        held = self._held_slots()
        starts = np.flatnonzero(np.diff(held, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(held))
        return {
            "slots": np.stack([held[starts], lengths], axis=1).tolist(),
            "next_slot": self._next_slot,
            "offset": self._index.offset,
        }

    @classmethod
    def from_state(cls, settings: Replay, state: dict[str, Any], rollouts: Sequence[Rollout]) -> ReplayBuffer:
        """The buffer whose `state_dict()` and `rollouts` these are: with the same settings, the same draws.

        Raises:
            StateError: If they do not belong together.
        """
        slots = np.array([slot for first, length in state["slots"] for slot in range(first, first + length)], dtype=int)
        if len(slots) != len(rollouts):
            raise StateError(f"the saved buffer has slots for {len(slots)} rollouts, and {len(rollouts)} are saved")
        buffer = cls(settings)
        buffer._index = PriorityIndex(offset=state["offset"])
        buffer._put(rollouts, slots)
        buffer._next_slot = state["next_slot"]
        buffer._trim_to_capacity()  # it may be smaller than the one that was saved
        return buffer

    def _put(self, rollouts: Sequence[Rollout], slots_B: NDArray[np.int64] | None) -> None:
        """Store rollouts in these slots; None: in the next ones."""
        if not rollouts:
            return
        births_B = np.array([rollout.birth_step for rollout in rollouts], dtype=np.int64)
        advantages_B = np.array([rollout.advantage for rollout in rollouts])
        if not np.isfinite(advantages_B).all():
            bad = rollouts[int(np.flatnonzero(~np.isfinite(advantages_B))[0])]
            raise ConfigError(f"the advantage of a rollout of prompt {bad.prompt_id!r} is {bad.advantage}")
        if slots_B is None:
            slots_B = self._take_slots(len(rollouts))
        self._index.set(slots_B, self.log_keys(advantages_B, births_B))
        self._make_room()
        new = np.empty(len(rollouts), dtype=object)
        new[:] = rollouts
        self._rollouts_N[slots_B] = new
        self._nbytes_N[slots_B] = nbytes_B = np.array([rollout.nbytes for rollout in rollouts], dtype=np.int64)
        self._num_held += len(rollouts)
        self._nbytes_held += int(nbytes_B.sum())
        by_birth = np.argsort(births_B, kind="stable")
        births, starts = np.unique(births_B[by_birth], return_index=True)
        for birth, slots in zip(births.tolist(), np.split(slots_B[by_birth], starts[1:]), strict=True):
            if birth not in self._slots_of_birth:
                heapq.heappush(self._births, birth)
                self._slots_of_birth[birth] = deque()
            self._slots_of_birth[birth].append(slots)

    def _take_slots(self, num_slots: int) -> NDArray[np.int64]:
        # When to close the holes depends on what is held alone, so that a restored buffer does it at the same time.
        enough = 2 * (self._num_held + num_slots) + _SPARE_SLOTS
        if self._next_slot + num_slots > enough:
            self._close_holes(enough)
        self._next_slot += num_slots
        return np.arange(self._next_slot - num_slots, self._next_slot)

    def _close_holes(self, num_slots: int) -> None:
        held = self._held_slots()
        index = PriorityIndex(num_slots, offset=self._index.offset)
        index.set(np.arange(len(held)), self._index.log_keys(held))
        rollouts, nbytes_N = self._rollouts_N[held], self._nbytes_N[held]
        self._index, self._next_slot = index, len(held)
        self._rollouts_N, self._nbytes_N = np.empty(0, dtype=object), np.empty(0, dtype=np.int64)
        self._make_room()
        self._rollouts_N[: len(held)], self._nbytes_N[: len(held)] = rollouts, nbytes_N
        for chunks in self._slots_of_birth.values():
            moved = np.searchsorted(held, np.concatenate(chunks))
            chunks.clear()
            chunks.append(moved)

    def _make_room(self) -> None:
        added = self._index.capacity - len(self._nbytes_N)
        if added:
            self._rollouts_N = np.concatenate([self._rollouts_N, np.empty(added, dtype=object)])
            self._nbytes_N = np.concatenate([self._nbytes_N, np.zeros(added, dtype=np.int64)])

    def _held_slots(self) -> NDArray[np.int64]:
        """Slots of all rollouts, in the order of insertion."""
        chunks = [slots for chunks in self._slots_of_birth.values() for slots in chunks]
        return np.sort(np.concatenate(chunks)) if chunks else np.zeros(0, dtype=np.int64)

    def _drop(self, slots: NDArray[np.int64]) -> None:
        self._index.remove(slots)
        self._rollouts_N[slots] = None
        self._num_held -= len(slots)
        self._nbytes_held -= int(self._nbytes_N[slots].sum())

    def _trim_to_capacity(self) -> None:
        """Drop the oldest by birth, not by position: a survivor's pilots, late, must not push out what is younger."""
        while True:
            surplus = max(0, self._num_held - self.settings.capacity_rollouts)
            excess_bytes = self._nbytes_held - self.settings.capacity_bytes
            if not surplus and excess_bytes <= 0:
                return
            chunks = self._slots_of_birth[self._births[0]]
            oldest = chunks.popleft()
            if excess_bytes > 0:
                surplus = max(surplus, int(np.searchsorted(np.cumsum(self._nbytes_N[oldest]), excess_bytes)) + 1)
            self._drop(oldest[:surplus])
            if surplus < len(oldest):
                chunks.appendleft(oldest[surplus:])
            elif not chunks:
                del self._slots_of_birth[heapq.heappop(self._births)]
