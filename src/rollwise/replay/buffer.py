"""The replay buffer: rollouts drawn by priority and freshness, each for a bounded time.

Source: "Rollout-Level Advantage-Prioritized Experience Replay for GRPO", arXiv 2606.04560, for the priority and
the age bound; "Freshness-Aware Prioritized Experience Replay", arXiv 2604.16918, for the exponential decay.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollwise.errors import RolloutError, StateError
from rollwise.replay.freshness import Clock
from rollwise.replay.priority_index import PriorityIndex
from rollwise.replay.settings import AUTO, RECENCY, Replay
from rollwise.replay.units import Unit, Units, rollouts_of, split_units
from rollwise.rollout import Rollout

_RECENCY_RATE = 1000.0  # far more than the noise of a draw: the newest always come first
_SPARE_SLOTS = 1024
#: One entry per slot.
_ARRAYS = ("_units_N", "_nbytes_N", "_sizes_N", "_uses_N", "_values_N", "_births_N", "_versions_N", "_kls_N")


class ReplayBuffer:
    """Units (rollouts or groups) with time-invariant log priorities.

    With `base_i = priority_i + epsilon`, by default `|A_i| + epsilon`, the probability to be drawn at step t is

        P(i) ∝ (base_i * exp(-(t - birth_i) / tau))^alpha

    The factor exp(-alpha t / tau) is common to all rollouts, so the key

        log_key_i = alpha * (log base_i + birth_i / tau)

    never changes and gives the same distribution: nothing has to be refreshed as rollouts age. The same holds on the
    clocks of policy versions and of cumulative KL, whose terms add up. Only a change of tau itself sets all keys anew.

    A group's birth is that of its oldest rollout.

    Units lie in slots, in the order of insertion. Those that leave, leave holes; when more than about half of the slots
    are holes, the rest moves together. So a step costs time for what enters, leaves and is drawn.

    Args:
        settings: See `Replay`.
    """

    def __init__(self, settings: Replay) -> None:
        self.settings = settings
        self._index = PriorityIndex()  # slot -> log key; the arrays below are as long
        self._units_N: NDArray[np.object_] = np.empty(0, dtype=object)  # see `Unit`; None in a hole
        self._nbytes_N = np.empty(0, dtype=np.int64)
        self._sizes_N = np.empty(0, dtype=np.int64)  # rollouts in a unit
        self._uses_N = np.empty(0, dtype=np.int64)  # how often it has been drawn
        self._values_N = np.empty(0)  # priority in force, before epsilon
        self._births_N = np.empty(0, dtype=np.int64)  # birth on the clocks: step, policy version, cumulative KL
        self._versions_N = np.empty(0, dtype=np.int64)
        self._kls_N = np.empty(0)
        self._tau_steps = None if isinstance(settings.decay_tau_steps, str) else settings.decay_tau_steps
        self._reads_versions = settings.max_age_versions is not None or settings.decay_tau_versions is not None
        self._reads_kl = settings.max_age_kl is not None or settings.decay_tau_kl is not None
        self._num_entered = 0  # rollouts
        self._recent_slots = np.empty(0, dtype=np.int64)  # drawn last or inserted since
        self._has_set_priorities = False
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
        return rollouts_of(self._units_N[self._held_slots()].tolist())

    @property
    def num_entered(self) -> int:
        """Rollouts inserted since the run began or was resumed."""
        return self._num_entered

    @property
    def decay_tau_steps(self) -> float | None:
        """tau in force, in steps; None: no decay."""
        return self._tau_steps

    def set_decay_tau_steps(self, tau_steps: float | None) -> None:
        """Set tau, in steps; all keys are computed anew: O(N), without a loop in Python."""
        self._tau_steps = tau_steps
        held = self._held_slots()
        self._set_keys(held, self._values_N[held])

    def log_keys(
        self, values_B: NDArray[np.float64], births_B: ArrayLike, versions_B: ArrayLike = 0, kls_B: ArrayLike = 0.0
    ) -> NDArray[np.float64]:
        """`alpha * (log(|value| + epsilon) + sum over clocks of birth / tau)`; -inf where |value| + epsilon is 0.

        Args:
            values_B: Priorities before epsilon, shape (B,).
            births_B: Birth steps, shape (B,).
            versions_B: Policy versions at birth, shape (B,).
            kls_B: Cumulative KL at birth in nats per token, shape (B,).

        Returns:
            Shape (B,), in nats.
        """
        settings = self.settings
        births_B = np.asarray(births_B, dtype=np.float64)
        if settings.priority == RECENCY:
            return _RECENCY_RATE * births_B
        with np.errstate(divide="ignore"):
            log_base_B = np.log(np.abs(values_B) + settings.epsilon)
        # 0 * -inf is undefined; alpha 0 means uniform over whatever can be drawn at all.
        keys_B = settings.alpha * log_base_B if settings.alpha else np.where(np.isneginf(log_base_B), -np.inf, 0)
        for readings_B, tau in (
            (births_B, self._tau_steps),
            (np.asarray(versions_B), settings.decay_tau_versions),
            (np.asarray(kls_B), settings.decay_tau_kl),
        ):
            if tau is not None:
                keys_B = keys_B + settings.alpha * readings_B / tau
        return keys_B

    def insert(self, rollouts: Sequence[Rollout]) -> None:
        """Store rollouts with their advantages and birth steps as they are now.

        Where the unit is a group, neighbours of the same prompt are one.

        Raises:
            ConfigError: If an advantage or a priority is not finite, or a priority is negative.
        """
        self._put(split_units(rollouts, self.settings.unit), None)
        self._trim_to_capacity()

    def evict(self, now: Clock | int) -> None:
        """Drop what is older than an age bound at `now`, a clock or a step.

        Of two rollouts the one with the earlier birth step must not be the younger one on another clock.
        """
        step, version, kl = now if isinstance(now, Clock) else Clock(now)
        bounds = (
            (step, self._births_N, self.settings.max_age_steps),
            (version, self._versions_N, self.settings.max_age_versions),
            (kl, self._kls_N, self.settings.max_age_kl),
        )
        while self._births:
            first = self._slots_of_birth[self._births[0]][0][0]  # all of one birth step are as old
            if all(bound is None or reading - births_N[first] <= bound for reading, births_N, bound in bounds):
                break
            for slots in self._slots_of_birth.pop(heapq.heappop(self._births)):
                self._drop(slots)

    def draw(self, num_units: int, now: Clock | int, rng: np.random.Generator) -> list[Rollout]:
        """Draw different units, none older than an age bound at `now`; fewer if fewer are held."""
        return self.draw_weighted(num_units, now, rng)[0]

    def draw_weighted(
        self, num_units: int, now: Clock | int, rng: np.random.Generator
    ) -> tuple[list[Rollout], list[float]]:
        """As `draw`, with each rollout's importance weight (1 where `per_beta` is None).

        With N units held, of which i is drawn first with probability P(i), and beta as of now:

            w_i = (N P(i))^-beta / max over the draw of (N P(j))^-beta

        Source: "Prioritized Experience Replay", arXiv 1511.05952, section 3.4.
        """
        self.evict(now)
        slots = self._index.draw(num_units, rng)
        rollouts = rollouts_of(self._units_N[slots].tolist())
        weights = [1.0] * len(rollouts)
        if self.settings.per_beta is not None and len(slots):
            beta = self.settings.beta(now.step if isinstance(now, Clock) else now)
            log_weights_B = -beta * self._index.log_keys(slots)  # N and the sum over all cancel
            weights_B = np.exp(log_weights_B - log_weights_B.max())
            weights = np.repeat(weights_B, self._sizes_N[slots]).tolist()
        self._recent_slots = slots
        self._uses_N[slots] += 1
        if self.settings.newcomers == "max":
            self._return_to_own_priority(slots[self._uses_N[slots] == 1])
        if self.settings.max_uses is not None:
            self._discard(slots[self._uses_N[slots] >= self.settings.max_uses])
        return rollouts, weights

    def set_priorities(self, rollouts: Sequence[Rollout], priorities: ArrayLike) -> None:
        """Give rollouts new priorities: those of the last draw and those inserted since, as far as they are held.

        A group's priority becomes the mean over those of its rollouts that are given. NaN: not given.

        Raises:
            RolloutError: If a priority is negative or infinite, or the numbers of both differ. Nothing is set.
        """
        priorities_B = np.asarray(priorities, dtype=np.float64)
        if priorities_B.shape != (len(rollouts),):
            raise RolloutError(
                f"priorities have the shape {priorities_B.shape} for {len(rollouts)} rows; give one a row"
            )
        bad_B = (priorities_B < 0) | np.isinf(priorities_B)
        if bad_B.any():
            raise RolloutError(
                f"the priority of row {int(bad_B.argmax())} is {priorities_B[bad_B][0]}; it must be finite and at "
                "least 0, or NaN to leave it as it is"
            )
        slots = self._recent_slots[self._sizes_N[self._recent_slots] > 0]
        given = dict(zip(map(id, rollouts), priorities_B.tolist(), strict=True))
        values_B = Units(self._units_N[slots].tolist()).means_of_given(given)
        is_given_B = ~np.isnan(values_B)
        slots, values_B = slots[is_given_B], values_B[is_given_B]
        self._values_N[slots] = values_B
        self._set_keys(slots, values_B)
        self._has_set_priorities = True

    def draw_probabilities(self) -> NDArray[np.float64]:
        """Probability of each of `rollouts`, in their order, to be in a draw of one unit, shape (len(self),)."""
        held = self._held_slots()
        keys = self._index.log_keys(held)
        if not len(held) or np.isneginf(keys).all():
            return np.zeros(len(self))
        weights = np.exp(keys - keys.max())
        return np.repeat(weights / weights.sum(), self._sizes_N[held])

    def starved_share(self) -> tuple[float, float]:
        """Share of the units held whose priority is 0, and their share of the probability, freshness left aside."""
        values_N = self._values_N[self._held_slots()]
        base_N = (values_N + self.settings.epsilon) ** self.settings.alpha
        is_zero_N = values_N == 0
        if not len(values_N) or not base_N.sum():
            return 0.0, 0.0
        return float(is_zero_N.mean()), float(base_N[is_zero_N].sum() / base_N.sum())

    def take_dropped_unused(self) -> list[Rollout]:
        """Rollouts that have left since the last call without ever having been in a batch."""
        dropped, self._dropped_unused = self._dropped_unused, []
        return dropped

    def _return_to_own_priority(self, slots: NDArray[np.int64]) -> None:
        if not len(slots):
            return
        self._values_N[slots] = Units(self._units_N[slots].tolist()).own_values(self.settings.priority)
        self._set_keys(slots, self._values_N[slots])

    def _set_keys(self, slots: NDArray[np.int64], values_B: NDArray[np.float64]) -> None:
        """Compute the keys of these slots from their priorities and births."""
        versions = self._versions_N[slots] if self._reads_versions else 0
        kls = self._kls_N[slots] if self._reads_kl else 0.0
        self._index.set(slots, self.log_keys(values_B, self._births_N[slots], versions, kls))

    def _discard(self, slots: NDArray[np.int64]) -> None:
        """Drop units wherever their birth's slots stand."""
        if not len(slots):
            return
        self._drop(slots)
        for birth in np.unique(self._births_N[slots]).tolist():
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
            "settings": self.settings.as_dict(),  # for those who read the file; a resumed run has its own
        }
        if self.settings.unit == "group":
            state["sizes"] = self._sizes_N[held].tolist()
        if self._tau_steps is not None and self.settings.decay_tau_steps == AUTO:
            state["tau_steps"] = self._tau_steps
        if self.settings.newcomers == "max" or self.settings.max_uses is not None or self._has_set_priorities:
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
            raise StateError(
                f"the saved buffer has slots for {sum(sizes)} rollouts, and {len(rollouts)} are saved; resume from an "
                "earlier checkpoint"
            )
        ends = np.cumsum(sizes).tolist()
        units: Sequence[Unit] = rollouts
        if settings.unit == "group":
            units = [tuple(rollouts[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        buffer = cls(settings)
        if settings.decay_tau_steps == AUTO:
            buffer._tau_steps = state.get("tau_steps")
        buffer._has_set_priorities = "values" in state
        buffer._index = PriorityIndex(offset=state["offset"])
        buffer._put(units, slots, state.get("values"))
        if "uses" in state:
            buffer._uses_N[slots] = state["uses"]
        buffer._next_slot, buffer._num_entered = state["next_slot"], 0
        buffer._trim_to_capacity()  # it may be smaller than the one that was saved
        return buffer

    def _put(
        self, units: Sequence[Unit], slots_B: NDArray[np.int64] | None, values: Sequence[float] | None = None
    ) -> None:
        """Store units in these slots (None: in the next ones), with these priorities (None: as newcomers)."""
        if not units:
            return
        of_units = Units(units)
        values_B = self._newcomer_values(of_units) if values is None else np.array(values, dtype=np.float64)
        if slots_B is None:
            slots_B = self._take_slots(len(units))
        births_B = of_units.reduce("birth_step", np.minimum, np.int64)
        self._make_room(int(slots_B.max()) + 1)
        self._births_N[slots_B] = births_B
        if self._reads_versions:
            self._versions_N[slots_B] = of_units.reduce("birth_version", np.minimum, np.int64)
        if self._reads_kl:
            self._kls_N[slots_B] = of_units.reduce("birth_kl", np.minimum, np.float64)
        self._units_N[slots_B] = np.fromiter(units, dtype=object, count=len(units))
        self._values_N[slots_B] = values_B
        self._set_keys(slots_B, values_B)
        self._uses_N[slots_B] = 0
        self._sizes_N[slots_B] = of_units.sizes_B
        self._nbytes_N[slots_B] = nbytes_B = of_units.reduce("nbytes", np.add, np.int64)
        self._recent_slots = np.concatenate([self._recent_slots, slots_B])
        self._num_held += len(units)
        self._num_entered += (num_rollouts := int(of_units.sizes_B.sum()))
        self._rollouts_held += num_rollouts
        self._nbytes_held += int(nbytes_B.sum())
        by_birth = np.argsort(births_B, kind="stable")
        ends = np.flatnonzero(np.diff(births_B[by_birth], append=births_B.max() + 1)) + 1
        for start, end in pairwise([0, *ends.tolist()]):
            slots, birth = slots_B[by_birth[start:end]], int(births_B[by_birth[start]])
            if birth not in self._slots_of_birth:
                heapq.heappush(self._births, birth)
                self._slots_of_birth[birth] = deque()
            self._slots_of_birth[birth].append(slots)

    def _newcomer_values(self, units: Units) -> NDArray[np.float64]:
        values_B = units.own_values(self.settings.priority)
        if self.settings.newcomers == "own":
            return values_B
        return np.full(len(values_B), max(values_B.max(), self._values_N.max(initial=0.0)))

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
        self._recent_slots = np.flatnonzero(np.isin(held, self._recent_slots))
        for chunks in self._slots_of_birth.values():
            moved = np.searchsorted(held, np.concatenate(chunks))
            chunks.clear()
            chunks.append(moved)

    def _make_room(self, num_slots: int) -> None:
        self._index.make_room(num_slots)
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
            rollouts = rollouts_of(self._units_N[slots].tolist())
            self._dropped_unused += [rollout for rollout in rollouts if rollout.num_uses == 0]
        self._units_N[slots] = None
        self._values_N[slots] = 0.0
        self._num_held -= len(slots)
        self._rollouts_held -= int(self._sizes_N[slots].sum())
        self._sizes_N[slots] = 0
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
