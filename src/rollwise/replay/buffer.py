"""The replay buffer: rollouts drawn by priority and freshness, each for a bounded number of steps.

Source: "Rollout-Level Advantage-Prioritized Experience Replay for GRPO", arXiv 2606.04560, for the priority and
the age bound; "Freshness-Aware Prioritized Experience Replay", arXiv 2604.16918, for the exponential decay.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollwise.errors import ConfigError, StateError
from rollwise.replay.priority import PRIORITIES, Priority
from rollwise.replay.priority_index import PriorityIndex
from rollwise.rollout import Rollout

#: Name of the priority that is the birth step itself.
RECENCY = "recency"
_RECENCY_RATE = 1000.0  # far more than the noise of a draw: the newest always come first
_SPARE_SLOTS = 1024
_ARRAYS = ("_units_N", "_nbytes_N", "_sizes_N", "_uses_N", "_values_N")  # one entry per slot


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Settings of replay. The defaults are those of arXiv 2606.04560.

    Attributes:
        ratio: Replayed rows per fresh row that carries a gradient (r).
        alpha: Exponent of the priority; 0 draws uniformly.
        epsilon: Added to the priority, so that no stored rollout has priority 0.
        composition: "fresh_anchored": every batch holds the fresh rows, whole, and a draw from the buffer. "pool":
            fresh rows enter the buffer first, and the whole batch, (1 + ratio) times the fresh rows, is drawn from it.
        unit: What is drawn: single rollouts ("rollout"), or whole groups ("group") whose priority is the mean over
            their rollouts. A multi-turn trajectory is one rollout.
        priority: Name in `rollwise.replay.priority.PRIORITIES`, or a function like those; "recency" draws the newest
            first, ties at random.
        newcomers: Whether a unit enters with its own priority ("own"), or with the largest in the buffer until it has
            been drawn once ("max", as in PER).
        max_uses: A unit leaves the buffer once it has been drawn this often; None: no limit.
        max_age_steps: Rollouts older than this are never drawn; None: no bound.
        decay_tau_steps: Priorities decay as exp(-age / tau) before alpha is applied; None: no decay.
        warmup_steps: Steps at the start of the run without replay; the buffer fills meanwhile.
        capacity_rollouts: The buffer holds at most this many rollouts; the oldest go first.
        capacity_bytes: The payloads it holds are at most this large together; the oldest go first.
    """

    ratio: float = 0.5
    alpha: float = 0.5
    epsilon: float = 1e-6
    composition: Literal["fresh_anchored", "pool"] = "fresh_anchored"
    unit: Literal["rollout", "group"] = "rollout"
    priority: str | Priority = "advantage"
    newcomers: Literal["own", "max"] = "own"
    max_uses: int | None = None
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
        if not callable(self.priority) and self.priority not in (*PRIORITIES, RECENCY):
            raise ConfigError(
                f"priority is {self.priority!r}; it must be one of {(*PRIORITIES, RECENCY)}, or a function of rollouts"
            )
        for name, choices in (
            ("composition", ("fresh_anchored", "pool")),
            ("unit", ("rollout", "group")),
            ("newcomers", ("own", "max")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {choices}")
        if self.max_uses is not None and self.max_uses < 1:
            raise ConfigError(f"max_uses is {self.max_uses}; it must be at least 1 (None: no limit)")
        if self.max_age_steps is not None and self.max_age_steps < 1:
            raise ConfigError(
                f"max_age_steps is {self.max_age_steps}; a stored rollout is at least one step old when it is "
                "drawn, so it must be at least 1 (None: no bound; ratio 0: no replay)"
            )
        if self.decay_tau_steps is not None and not self.decay_tau_steps > 0:
            raise ConfigError(f"decay_tau_steps is {self.decay_tau_steps}; it must be above 0 (None: no decay)")


class ReplayBuffer:
    """Units (rollouts or groups) with time-invariant log priorities.

    With `base_i = priority_i + epsilon`, by default `|A_i| + epsilon`, the probability to be drawn at step t is

        P(i) ∝ (base_i * exp(-(t - birth_i) / tau))^alpha

    The factor exp(-alpha t / tau) is common to all rollouts, so the key

        log_key_i = alpha * (log base_i + birth_i / tau)

    never changes and gives the same distribution: nothing has to be refreshed as rollouts age.

    A group's birth is that of its oldest rollout.

    Units lie in slots, in the order of insertion. Those that leave, leave holes; when more than about half of the slots
    are holes, the rest moves together. So a step costs time for what enters, leaves and is drawn.

    Args:
        settings: See `Replay`.
    """

    def __init__(self, settings: Replay) -> None:
        self.settings = settings
        self._index = PriorityIndex()  # slot -> log key; the arrays below are as long
        self._units_N: NDArray[np.object_] = np.empty(0, dtype=object)  # tuples of rollouts; None in a hole
        self._nbytes_N = np.empty(0, dtype=np.int64)
        self._sizes_N = np.empty(0, dtype=np.int64)  # rollouts in a unit
        self._uses_N = np.empty(0, dtype=np.int64)  # how often it has been drawn
        self._values_N = np.empty(0)  # priority in force, before epsilon
        self._next_slot = 0
        self._num_held = 0  # units
        self._rollouts_held = 0
        self._nbytes_held = 0
        self._dropped_unused: list[Rollout] = []
        # Births come out of order where a group is completed late, so age is not a matter of slots.
        self._slots_of_birth: dict[int, deque[NDArray[np.int64]]] = {}  # birth step -> slots, first inserted first
        self._births: list[int] = []  # its keys, as a heap

    def __len__(self) -> int:
        return self._rollouts_held

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads held."""
        return self._nbytes_held

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts held, oldest insertion first."""
        return [rollout for unit in self._units_N[self._held_slots()].tolist() for rollout in unit]

    def log_keys(self, values_B: NDArray[np.float64], births_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """`alpha * (log(|value| + epsilon) + birth / tau)`, shape (B,); -inf where |value| + epsilon is 0."""
        settings = self.settings
        if settings.priority == RECENCY:
            return _RECENCY_RATE * births_B.astype(np.float64)
        with np.errstate(divide="ignore"):
            log_base_B = np.log(np.abs(values_B) + settings.epsilon)
        # 0 * -inf is undefined; alpha 0 means uniform over whatever can be drawn at all.
        keys_B = settings.alpha * log_base_B if settings.alpha else np.where(np.isneginf(log_base_B), -np.inf, 0)
        if settings.decay_tau_steps is not None:
            keys_B = keys_B + settings.alpha * births_B / settings.decay_tau_steps
        return keys_B

    def insert(self, rollouts: Sequence[Rollout]) -> None:
        """Store rollouts with their advantages and birth steps as they are now.

        Where the unit is a group, neighbours of the same prompt are one.

        Raises:
            ConfigError: If an advantage or a priority is not finite, or a priority is negative.
        """
        if self.settings.unit == "group":
            units = [tuple(members) for _, members in groupby(rollouts, key=lambda rollout: rollout.prompt_id)]
        else:
            units = [(rollout,) for rollout in rollouts]
        self._put(units, None)
        self._trim_to_capacity()

    def evict(self, step: int) -> None:
        """Drop what is older than the age bound at `step`."""
        if self.settings.max_age_steps is None:
            return
        while self._births and step - self._births[0] > self.settings.max_age_steps:
            for slots in self._slots_of_birth.pop(heapq.heappop(self._births)):
                self._drop(slots)

    def draw(self, num_units: int, step: int, rng: np.random.Generator) -> list[Rollout]:
        """Draw different units, none older than the age bound at `step`; fewer if fewer are held."""
        self.evict(step)
        slots = self._index.draw(num_units, rng)
        drawn = [rollout for unit in self._units_N[slots].tolist() for rollout in unit]
        self._uses_N[slots] += 1
        if self.settings.newcomers == "max":
            self._return_to_own_priority(slots[self._uses_N[slots] == 1])
        if self.settings.max_uses is not None:
            self._discard(slots[self._uses_N[slots] >= self.settings.max_uses])
        return drawn

    def take_dropped_unused(self) -> list[Rollout]:
        """Rollouts that have left since the last call without ever having been in a batch."""
        dropped, self._dropped_unused = self._dropped_unused, []
        return dropped

    def _return_to_own_priority(self, slots: NDArray[np.int64]) -> None:
        if not len(slots):
            return
        units = self._units_N[slots].tolist()
        self._values_N[slots] = self._own_values(units)
        births_B = np.array([_birth(unit) for unit in units], dtype=np.int64)
        self._index.set(slots, self.log_keys(self._values_N[slots], births_B))

    def _discard(self, slots: NDArray[np.int64]) -> None:
        """Drop units wherever their birth's slots stand."""
        if not len(slots):
            return
        births = {_birth(unit) for unit in self._units_N[slots].tolist()}
        self._drop(slots)
        for birth in births:
            chunks = self._slots_of_birth[birth]
            for _ in range(len(chunks)):
                left = (chunk := chunks.popleft())[~np.isin(chunk, slots)]
                if len(left):
                    chunks.append(left)
            if not chunks:
                del self._slots_of_birth[birth]
                self._births.remove(birth)
                heapq.heapify(self._births)

    def state_dict(self) -> dict[str, Any]:
        """What decides the draws to come beyond `rollouts`, JSON-able: their slots, as runs [first, length]."""
        held = self._held_slots()
        starts = np.flatnonzero(np.diff(held, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(held))
        state = {
            "slots": np.stack([held[starts], lengths], axis=1).tolist(),
            "next_slot": self._next_slot,
            "offset": self._index.offset,
        }
        if self.settings.unit == "group":
            state["sizes"] = self._sizes_N[held].tolist()
        if self.settings.newcomers == "max" or self.settings.max_uses is not None:
            state["uses"] = self._uses_N[held].tolist()
            state["values"] = self._values_N[held].tolist()
        return state

    @classmethod
    def from_state(cls, settings: Replay, state: dict[str, Any], rollouts: Sequence[Rollout]) -> ReplayBuffer:
        """The buffer whose `state_dict()` and `rollouts` these are: with the same settings, the same draws.

        Raises:
            StateError: If they do not belong together.
        """
        slots = np.array([slot for first, length in state["slots"] for slot in range(first, first + length)], dtype=int)
        sizes = state.get("sizes", [1] * len(slots))
        if ("sizes" in state) != (settings.unit == "group"):
            raise StateError(
                f"the saved buffer holds {'groups' if 'sizes' in state else 'rollouts'}, this run replays by "
                f"{settings.unit}; resume with the unit that the run was started with"
            )
        if sum(sizes) != len(rollouts) or len(sizes) != len(slots):
            raise StateError(f"the saved buffer has slots for {sum(sizes)} rollouts, and {len(rollouts)} are saved")
        ends = np.cumsum(sizes).tolist()
        units = [tuple(rollouts[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        buffer = cls(settings)
        buffer._index = PriorityIndex(offset=state["offset"])
        buffer._put(units, slots, state.get("values"))
        if "uses" in state:
            buffer._uses_N[slots] = state["uses"]
        buffer._next_slot = state["next_slot"]
        buffer._trim_to_capacity()  # it may be smaller than the one that was saved
        return buffer

    def _put(
        self,
        units: Sequence[tuple[Rollout, ...]],
        slots_B: NDArray[np.int64] | None,
        values: Sequence[float] | None = None,
    ) -> None:
        """Store units in these slots (None: in the next ones), with these priorities (None: as newcomers)."""
        if not units:
            return
        births_B = np.array([_birth(unit) for unit in units], dtype=np.int64)
        values_B = self._newcomer_values(units) if values is None else np.array(values, dtype=np.float64)
        if slots_B is None:
            slots_B = self._take_slots(len(units))
        self._index.set(slots_B, self.log_keys(values_B, births_B))
        self._make_room()
        new = np.empty(len(units), dtype=object)
        new[:] = units
        self._units_N[slots_B] = new
        self._values_N[slots_B] = values_B
        self._uses_N[slots_B] = 0
        self._sizes_N[slots_B] = sizes_B = np.array([len(unit) for unit in units], dtype=np.int64)
        nbytes = [sum(rollout.nbytes for rollout in unit) for unit in units]
        self._nbytes_N[slots_B] = nbytes_B = np.array(nbytes, dtype=np.int64)
        self._num_held += len(units)
        self._rollouts_held += int(sizes_B.sum())
        self._nbytes_held += int(nbytes_B.sum())
        by_birth = np.argsort(births_B, kind="stable")
        births, starts = np.unique(births_B[by_birth], return_index=True)
        for birth, slots in zip(births.tolist(), np.split(slots_B[by_birth], starts[1:]), strict=True):
            if birth not in self._slots_of_birth:
                heapq.heappush(self._births, birth)
                self._slots_of_birth[birth] = deque()
            self._slots_of_birth[birth].append(slots)

    def _own_values(self, units: Sequence[tuple[Rollout, ...]]) -> NDArray[np.float64]:
        """The units' own priorities: the mean over their rollouts."""
        rollouts = [rollout for unit in units for rollout in unit]
        for rollout in rollouts:
            if not math.isfinite(rollout.advantage):
                raise ConfigError(f"the advantage of a rollout of prompt {rollout.prompt_id!r} is {rollout.advantage}")
        name = self.settings.priority
        function = name if callable(name) else PRIORITIES["uniform" if name == RECENCY else name]
        values_B = np.asarray(function(rollouts), dtype=np.float64)
        if values_B.shape != (len(rollouts),) or not (values_B >= 0).all() or not np.isfinite(values_B).all():
            raise ConfigError(
                f"priority {getattr(name, '__name__', name)!r} gave {values_B[:5]}... of shape {values_B.shape} for "
                f"{len(rollouts)} rollouts; it must give one finite number of at least 0 for each"
            )
        sizes = np.array([len(unit) for unit in units], dtype=np.int64)
        means: NDArray[np.float64] = np.add.reduceat(values_B, np.cumsum(sizes) - sizes) / sizes
        return means

    def _newcomer_values(self, units: Sequence[tuple[Rollout, ...]]) -> NDArray[np.float64]:
        values_B = self._own_values(units)
        if self.settings.newcomers == "own":
            return values_B
        return np.full(len(units), max(values_B.max(), self._values_N.max(initial=0.0)))

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
        self._index, self._next_slot = index, len(held)
        for name in _ARRAYS:
            kept = getattr(self, name)[held]
            setattr(self, name, np.concatenate([kept, np.zeros(index.capacity - len(held), dtype=kept.dtype)]))
        for chunks in self._slots_of_birth.values():
            moved = np.searchsorted(held, np.concatenate(chunks))
            chunks.clear()
            chunks.append(moved)

    def _make_room(self) -> None:
        added = self._index.capacity - len(self._nbytes_N)
        for name in _ARRAYS if added else ():
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(added, dtype=array.dtype)]))

    def _held_slots(self) -> NDArray[np.int64]:
        """Slots of all units, in the order of insertion."""
        chunks = [slots for chunks in self._slots_of_birth.values() for slots in chunks]
        return np.sort(np.concatenate(chunks)) if chunks else np.zeros(0, dtype=np.int64)

    def _drop(self, slots: NDArray[np.int64]) -> None:
        self._index.remove(slots)
        if self.settings.composition == "pool":
            rollouts = (rollout for unit in self._units_N[slots].tolist() for rollout in unit)
            self._dropped_unused += [rollout for rollout in rollouts if rollout.num_uses == 0]
        self._units_N[slots] = None
        self._values_N[slots] = 0.0
        self._num_held -= len(slots)
        self._rollouts_held -= int(self._sizes_N[slots].sum())
        self._nbytes_held -= int(self._nbytes_N[slots].sum())

    def _trim_to_capacity(self) -> None:
        """Drop the oldest by birth, not by position: a survivor's pilots, late, must not push out what is younger."""
        while True:
            excesses = (
                (self._rollouts_held - self.settings.capacity_rollouts, self._sizes_N),
                (self._nbytes_held - self.settings.capacity_bytes, self._nbytes_N),
            )
            if all(excess <= 0 for excess, _ in excesses):
                return
            chunks = self._slots_of_birth[self._births[0]]
            oldest = chunks.popleft()
            surplus = max(
                int(np.searchsorted(np.cumsum(amounts_N[oldest]), excess)) + 1
                for excess, amounts_N in excesses
                if excess > 0
            )
            self._drop(oldest[:surplus])
            if surplus < len(oldest):
                chunks.appendleft(oldest[surplus:])
            elif not chunks:
                del self._slots_of_birth[heapq.heappop(self._births)]


def _birth(unit: tuple[Rollout, ...]) -> int:
    return min(rollout.birth_step for rollout in unit)
