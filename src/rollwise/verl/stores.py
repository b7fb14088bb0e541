"""Where the rows of stored rollouts live: on the driver, or sharded over actors of the Ray cluster.

The scheduler decides on the driver and needs scalars alone. Rows, which are thousands of times larger, go from
TransferQueue to the store and back; with shards none of them ever passes through the driver.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollwise.rollout import Rollout
from rollwise.storage import load_state, save_state
from rollwise.verl.media import media_nbytes
from rollwise.verl.rows import Place, RowArrays


def _queue() -> Any:
    """The module that talks to TransferQueue, which needs verl."""
    from rollwise.verl import queue

    return queue


class PayloadStore(Protocol):
    """Keeps the rows of rollouts. Rollouts that the scheduler lets go of are forgotten without being told."""

    def take(self, rollouts: Sequence[Rollout], sessions: Sequence[Sequence[str]]) -> None:
        """Move generated rows from the queue here; sets `payload` and `owner` of the rollouts.

        Their `nbytes` grow by those of images, video and audio, which nobody has seen before.
        """

    def write(self, rollouts: Sequence[Rollout], places: Sequence[Place]) -> tuple[list[str], list[dict[str, Any]]]:
        """Write the rollouts' rows to train on; returns keys and tags of the rows, in the order of the rollouts."""

    def settle_log_probs(
        self, rollouts: Sequence[Rollout], places: Sequence[Place], *, replaces_old: bool, clip: tuple[float, float]
    ) -> NDArray[np.float64]:
        """See `rollwise.verl.queue.settle_log_probs`."""

    def save(self, folder: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
        """Save a scheduler's state, atomically."""

    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Load a scheduler's state, whatever store has saved it."""


class DriverStore:
    """Rows are held by the rollouts themselves, on the driver."""

    def take(self, rollouts: Sequence[Rollout], sessions: Sequence[Sequence[str]]) -> None:
        """See `PayloadStore`."""
        for rollout, arrays in zip(rollouts, _queue().read(sessions), strict=True):
            rollout.payload = arrays
            rollout.nbytes += media_nbytes(arrays)

    def write(self, rollouts: Sequence[Rollout], places: Sequence[Place]) -> tuple[list[str], list[dict[str, Any]]]:
        """See `PayloadStore`."""
        return _queue().write([rollout.payload for rollout in rollouts], places)

    def settle_log_probs(
        self, rollouts: Sequence[Rollout], places: Sequence[Place], *, replaces_old: bool, clip: tuple[float, float]
    ) -> NDArray[np.float64]:
        """See `rollwise.verl.queue.settle_log_probs`."""
        payloads = [rollout.payload for rollout in rollouts]
        return _queue().settle_log_probs(payloads, places, replaces_old=replaces_old, clip=clip)

    def save(self, folder: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
        """See `PayloadStore`."""
        save_state(folder, state)

    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """See `PayloadStore`."""
        return load_state(folder)


class Shard:
    """One actor's part of the rows, by number."""

    def __init__(self, rank: int, num_shards: int) -> None:
        _queue().connect()
        self._rank, self._num_shards = rank, num_shards
        self._rows: dict[int, RowArrays] = {}

    def take(self, numbers: Sequence[int], sessions: Sequence[Sequence[str]]) -> list[int]:
        """Move generated rows from the queue here; returns the bytes of their images, video and audio."""
        taken = _queue().read(sessions)
        self._rows.update(zip(numbers, taken, strict=True))
        return [media_nbytes(arrays) for arrays in taken]

    def write(self, numbers: Sequence[int], places: Sequence[Place]) -> tuple[list[list[str]], list[list[Any]]]:
        """Write rows to train on; keys and tags per rollout."""
        rollouts = [self._rows[number] for number in numbers]
        keys, tags = _queue().write(rollouts, places)
        ends = np.cumsum([len(arrays["response_lengths"]) for arrays in rollouts]).tolist()
        starts = [0, *ends[:-1]]
        pairs = list(zip(starts, ends, strict=True))
        return [keys[start:end] for start, end in pairs], [tags[start:end] for start, end in pairs]

    def settle_log_probs(self, numbers: Sequence[int], places: Sequence[Place], settings: Any) -> NDArray[np.float64]:
        """See `rollwise.verl.queue.settle_log_probs`."""
        return _queue().settle_log_probs([self._rows[number] for number in numbers], places, **settings)

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget rows."""
        for number in numbers:
            self._rows.pop(number, None)

    def save(self, folder: str, state: Mapping[str, Any], numbers: Sequence[int | None]) -> None:
        """Save the state with the payloads that are here; `numbers` has one per rollout, None for those elsewhere."""
        rollouts = [
            rollout if number is None else replace(rollout, payload=self._rows[number], nbytes=rollout.nbytes)
            for rollout, number in zip(state["rollouts"], numbers, strict=True)
        ]
        save_state(folder, dict(state, rollouts=rollouts), rank=self._rank, world_size=self._num_shards)

    def load(self, folder: str) -> None:
        """Take the payloads that fall to this shard, by the numbers of their rollouts in the state."""
        state = load_state(folder, rank=self._rank, world_size=self._num_shards)
        self._rows = {i: r.payload for i, r in enumerate(state["rollouts"]) if r.payload is not None}

    def nbytes(self) -> int:
        """Bytes of the rows held."""
        return sum(array.nbytes for arrays in self._rows.values() for array in arrays.values())


@dataclass(eq=False)
class Handle:
    """Stands for rows that a shard holds; when it goes, so do they."""

    number: int
    released: list[int]

    def __del__(self) -> None:
        self.released.append(self.number)


class ShardedStore:
    """Rows live in `num_shards` actors, spread over the nodes of the Ray cluster.

    The driver holds a handle of about 150 bytes for each rollout. Every shard moves its own rows between
    TransferQueue and itself, and writes and reads its own file of a checkpoint: the checkpoint's folder must be one
    that all nodes share, as verl's own checkpoints need as well.
    """

    def __init__(self, num_shards: int) -> None:
        import ray

        self._ray = ray
        actor = ray.remote(Shard).options(num_cpus=0, scheduling_strategy="SPREAD")
        self._shards = [actor.remote(rank, num_shards) for rank in range(num_shards)]
        self._released: list[list[int]] = [[] for _ in range(num_shards)]
        self._next = 0

    def take(self, rollouts: Sequence[Rollout], sessions: Sequence[Sequence[str]]) -> None:
        """See `PayloadStore`."""
        self._drop_released()
        by_shard: list[tuple[list[int], list[Sequence[str]]]] = [([], []) for _ in self._shards]
        owned: list[list[Rollout]] = [[] for _ in self._shards]
        for rollout, session in zip(rollouts, sessions, strict=True):
            rollout.owner = self._next % len(self._shards)
            rollout.payload = Handle(self._next, self._released[rollout.owner])
            self._next += 1
            numbers, keys = by_shard[rollout.owner]
            numbers.append(rollout.payload.number)
            keys.append(session)
            owned[rollout.owner].append(rollout)
        sizes = self._each("take", {rank: part for rank, part in enumerate(by_shard) if part[0]})
        for rank, of_media in sizes.items():
            for rollout, nbytes in zip(owned[rank], of_media, strict=True):
                rollout.nbytes += nbytes

    def write(self, rollouts: Sequence[Rollout], places: Sequence[Place]) -> tuple[list[str], list[dict[str, Any]]]:
        """See `PayloadStore`."""
        positions, parts = self._split(rollouts, places)
        keys: list[list[str]] = [[] for _ in rollouts]
        tags: list[list[dict[str, Any]]] = [[] for _ in rollouts]
        for rank, (part_keys, part_tags) in self._each("write", parts).items():
            for i, row_keys, row_tags in zip(positions[rank], part_keys, part_tags, strict=True):
                keys[i], tags[i] = row_keys, row_tags
        return [k for row in keys for k in row], [t for row in tags for t in row]

    def settle_log_probs(
        self, rollouts: Sequence[Rollout], places: Sequence[Place], *, replaces_old: bool, clip: tuple[float, float]
    ) -> NDArray[np.float64]:
        """See `rollwise.verl.queue.settle_log_probs`."""
        positions, parts = self._split(rollouts, places)
        settings = {"replaces_old": replaces_old, "clip": clip}
        entries = np.zeros((len(rollouts), 7))
        for rank, part in self._each("settle_log_probs", {r: (*p, settings) for r, p in parts.items()}).items():
            entries[positions[rank]] = part
        return entries

    def save(self, folder: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
        """See `PayloadStore`."""
        self._drop_released()
        handles = [rollout.payload for rollout in state["rollouts"]]
        owners = [rollout.owner for rollout in state["rollouts"]]
        bare = self._ray.put(dict(state, rollouts=[replace(r, payload=None) for r in state["rollouts"]]))
        parts = {
            rank: (
                str(folder),
                bare,
                [h.number if h and o == rank else None for h, o in zip(handles, owners, strict=True)],
            )
            for rank in range(len(self._shards))
        }
        self._each("save", parts)

    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """See `PayloadStore`."""
        num_shards = len(self._shards)
        state = load_state(folder, rank=-1, world_size=num_shards)  # all scalars and no payloads
        self._each("load", {rank: (str(folder),) for rank in range(num_shards)})
        for number, rollout in enumerate(state["rollouts"]):
            rollout.payload = Handle(number, self._released[rollout.owner])
        self._next = len(state["rollouts"])
        return state

    def nbytes(self) -> list[int]:
        """Bytes of the rows that each shard holds."""
        self._drop_released()
        return list(self._each("nbytes", dict.fromkeys(range(len(self._shards)), ())).values())

    def _split(
        self, rollouts: Sequence[Rollout], places: Sequence[Place]
    ) -> tuple[list[list[int]], dict[int, tuple[list[int], list[Place]]]]:
        """Positions of the rollouts by shard, and what each shard is told: numbers and places."""
        positions: list[list[int]] = [[] for _ in self._shards]
        for i, rollout in enumerate(rollouts):
            positions[rollout.owner].append(i)
        parts = {
            rank: ([rollouts[i].payload.number for i in mine], [places[i] for i in mine])
            for rank, mine in enumerate(positions)
            if mine
        }
        return positions, parts

    def _each(self, method: str, parts: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of several shards at once."""
        calls = [getattr(self._shards[rank], method).remote(*arguments) for rank, arguments in parts.items()]
        return dict(zip(parts, self._ray.get(calls), strict=True))

    def _drop_released(self) -> None:
        for rank, released in enumerate(self._released):
            if released:
                numbers = released[:]
                del released[: len(numbers)]
                self._shards[rank].drop.remote(numbers)
