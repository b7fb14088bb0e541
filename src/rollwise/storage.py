"""State files: the scheduler's state as Arrow IPC files, one per process.

A file is a table with one row per kept rollout; the rest of the state is JSON in its metadata. Nothing in it is
ever executed when it is read, and other programs open it: pandas (`read_feather`), Polars (`read_ipc`), DuckDB (its
extension nanoarrow). Payload arrays are columns named `payload.<name>`, null where another process holds the payload.
Needs pyarrow.

The JSON also holds a CRC-32 of the whole file, taken while its own digits are zeros. It is checked before anything is
parsed: Arrow itself follows damaged offsets out of bounds, and would not notice a changed number at all.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rollwise.errors import StateError
from rollwise.files import replacing
from rollwise.rollout import Rollout
from rollwise.scheduler import STATE_FORMAT

_METADATA_KEY = b"rollwise"
_CHECKSUM_KEY = "rollwise_crc32"
_UNSEALED = f'"{_CHECKSUM_KEY}": "{0:08x}"'.encode()
_SEAL = re.compile(rf'"{_CHECKSUM_KEY}": "([0-9a-f]{{8}})"'.encode())
_FILE_NAME = "rollwise-{rank:05d}-of-{world_size:05d}.arrow"
_FILE_PATTERN = re.compile(r"rollwise-(\d{5})-of-(\d{5})\.arrow")
_TEXT = ("purpose",)
_FLOATS = ("reward", "advantage", "group_mean", "group_std", "td_error", "birth_kl")
_INTEGERS = ("birth_step", "birth_version", "num_tokens", "num_loss_tokens", "nbytes", "owner", "num_uses")
_SCALARS = ("prompt_id", *_TEXT, *_FLOATS, *_INTEGERS)
_DTYPES = frozenset(map(np.dtype, "?bhilqBHILQefd"))
_PAYLOAD = "payload."
_PART_BYTES = 1 << 24  # of payloads that are written at once
_ADVICE = "resume from an earlier checkpoint"


def save_state(folder: str | os.PathLike[str], state: Mapping[str, Any], *, rank: int = 0, world_size: int = 1) -> Path:
    """Write `RolloutScheduler.state_dict()` into `folder`, atomically.

    Every process calls it with its own rank; each file holds the payloads that its process owns.

    Args:
        folder: The checkpoint's folder; created if missing.
        state: The state.
        rank: This process.
        world_size: Number of processes.

    Returns:
        The file written.

    Raises:
        StateError: If a payload cannot be saved.
    """
    import pyarrow as pa

    rollouts: list[Rollout] = state["rollouts"]
    rest = {_CHECKSUM_KEY: f"{0:08x}"} | {key: value for key, value in state.items() if key != "rollouts"}
    schema = _schema(rollouts, rank).with_metadata({_METADATA_KEY: json.dumps(rest)})
    folder = Path(folder)
    path = folder / _FILE_NAME.format(rank=rank, world_size=world_size)
    with replacing(path) as partial:
        with open(partial, "wb") as file:
            sink = _Summed(file)
            with pa.ipc.new_file(sink, schema) as writer:
                for start, stop in _parts(rollouts, rank):
                    writer.write_batch(_record_batch(schema, rollouts[start:stop], rank))
        _seal(partial, sink.checksum)
    if rank == 0:  # a run with another number of processes may have saved here before
        for other, match in _state_files(folder).items():
            if int(match[2]) != world_size:
                other.unlink(missing_ok=True)
    return path


def load_state(folder: str | os.PathLike[str], *, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Read what `save_state` wrote, also by another number of processes.

    Where the number of processes changed, payloads are dealt out anew, round robin.

    Args:
        folder: The checkpoint's folder.
        rank: This process.
        world_size: Number of processes now.

    Returns:
        The state, for `RolloutScheduler.load_state_dict`.

    Raises:
        StateError: If files are missing, damaged, foreign or contradict each other; the message names the file.
    """
    folder = Path(folder)
    files = _state_files(folder)
    if not files:
        raise StateError(
            f"{folder} holds no rollwise state: its saving was interrupted, or it was made without replay and "
            "allocation; resume from an earlier checkpoint, or load its weights as the model of a new run"
        )
    shards = {int(match[1]) for match in files.values()}
    saved_worlds = {int(match[2]) for match in files.values()}
    if len(saved_worlds) > 1 or shards != set(range(max(saved_worlds))):
        raise StateError(
            f"{folder} holds the rollwise state of processes {sorted(shards)} of {sorted(saved_worlds)}: its "
            f"saving was interrupted; {_ADVICE}"
        )
    saved_world = max(saved_worlds)

    deal_to = None if saved_world == world_size else world_size
    first, *others = files
    shard = _read(first, rank, deal_to)
    for path in others:
        other = _read(path, rank, deal_to)
        if other.decisions != shard.decisions or not other.scalars.equals(shard.scalars):
            raise StateError(
                f"{path} (step {other.rest['step']}, {len(other.payloads)} rollouts) and {first} (step "
                f"{shard.rest['step']}, {len(shard.payloads)} rollouts) are not of the same save; {_ADVICE}"
            )
        for i, payload in enumerate(other.payloads):
            if payload is not None:
                shard.payloads[i] = payload
    columns = shard.columns | {"payload": shard.payloads}
    rollouts = list(map(Rollout, *(columns[field.name] for field in fields(Rollout))))
    return shard.rest | {"rollouts": rollouts}


def _state_files(folder: Path) -> dict[Path, re.Match[str]]:
    """State files in the order of their processes, with rank and number of processes."""
    return {path: match for path in sorted(folder.glob("rollwise-*")) if (match := _FILE_PATTERN.fullmatch(path.name))}


class _Summed:
    """A file to write to, with the CRC-32 of what was written."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.checksum = 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Whoever opened the file closes it."""


def _schema(rollouts: Sequence[Rollout], rank: int) -> Any:
    """The file's columns.

    Raises:
        StateError: If a payload of this process cannot be saved.
    """
    import pyarrow as pa

    dtypes: dict[str, np.dtype[Any]] = {}
    for rollout in rollouts:
        if rollout.owner != rank or rollout.payload is None:
            continue
        if not isinstance(rollout.payload, Mapping):
            raise _cannot_be_saved(rollout)
        for name, array in rollout.payload.items():
            if not isinstance(name, str) or not isinstance(array, np.ndarray) or array.ndim != 1:
                raise _cannot_be_saved(rollout)
            dtype = array.dtype
            if dtype not in _DTYPES:
                raise _cannot_be_saved(rollout)
            if dtypes.setdefault(name, dtype) != dtype:
                raise StateError(
                    f"the payload arrays {name!r} have the dtypes {dtypes[name]} and {dtype}; give all of them the same"
                )
    is_text = any(isinstance(rollout.prompt_id, str) for rollout in rollouts)
    types = {"prompt_id": pa.string() if is_text else pa.int64()}
    for names, kind in ((_TEXT, pa.string()), (_FLOATS, pa.float64()), (_INTEGERS, pa.int64())):
        types |= dict.fromkeys(names, kind)
    types |= {_PAYLOAD + name: pa.large_list(pa.from_numpy_dtype(dtypes[name])) for name in sorted(dtypes)}
    return pa.schema(list(types.items()))


def _cannot_be_saved(rollout: Rollout) -> StateError:
    return StateError(
        f"the payload of a rollout of prompt {rollout.prompt_id!r} cannot be saved; it must be a mapping from names to "
        "one-dimensional numpy arrays of numbers (at most 64 bits, native byte order), or None"
    )


def _parts(rollouts: Sequence[Rollout], rank: int) -> Iterator[tuple[int, int]]:
    """Bounds of the parts that are written one after another, so that no second copy of all payloads is made."""
    start, nbytes = 0, 0
    for i, rollout in enumerate(rollouts):
        if nbytes >= _PART_BYTES:
            yield start, i
            start, nbytes = i, 0
        nbytes += rollout.nbytes if rollout.owner == rank else 0
    if start < len(rollouts):
        yield start, len(rollouts)


def _record_batch(schema: Any, rollouts: Sequence[Rollout], rank: int) -> Any:
    import pyarrow as pa

    payloads = [(rollout.payload if rollout.owner == rank else None) or {} for rollout in rollouts]
    columns = []
    for column in schema:
        if column.name in _SCALARS:
            columns.append(pa.array(list(map(attrgetter(column.name), rollouts)), column.type))
        else:
            name = column.name.removeprefix(_PAYLOAD)
            columns.append(_list_column([payload.get(name) for payload in payloads], column.type))
    return pa.record_batch(columns, schema=schema)


def _list_column(arrays: Sequence[np.ndarray[Any, Any] | None], kind: Any) -> Any:
    """One list per row, null for None."""
    import pyarrow as pa

    lengths = np.array([0 if array is None else len(array) for array in arrays], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    present = [array for array in arrays if array is not None]
    values = pa.array(np.concatenate(present), kind.value_type) if present else pa.array([], kind.value_type)
    missing = np.array([array is None for array in arrays])
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, mask=pa.array(missing))


def _seals(data: mmap.mmap | bytes, seal: bytes) -> list[int]:
    """Where the checksum stands: in the schema at the file's start, and in its copy at the file's end."""
    return sorted({data.find(seal), data.rfind(seal)})


def _seal(path: Path, checksum: int) -> None:
    """Put the file's checksum in the place of the zeros."""
    with open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            starts = _seals(data, _UNSEALED)
        for start in starts:
            file.seek(start)
            file.write(_sealed(checksum))


def _sealed(checksum: int) -> bytes:
    return f'"{_CHECKSUM_KEY}": "{checksum:08x}"'.encode()


def _is_whole(data: mmap.mmap | bytes, seal: bytes) -> bool:
    checksum, end = 0, 0
    with memoryview(data) as view:
        for start in _seals(data, seal):
            checksum = zlib.crc32(_UNSEALED, zlib.crc32(view[end:start], checksum))
            end = start + len(seal)
        return _sealed(zlib.crc32(view[end:], checksum)) == seal


def _mapped(path: Path) -> mmap.mmap | bytes:
    with open(path, "rb") as file:
        is_empty = os.fstat(file.fileno()).st_size == 0  # which cannot be mapped
        return b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@dataclass(slots=True)
class _Shard:
    """What one file holds.

    Attributes:
        rest: The state without its rollouts.
        decisions: The same as text, for comparing: NaN is not equal to itself.
        scalars: The rollouts' fields as a table, floats as their bits, for comparing.
        columns: The rollouts' fields by name, with the owners that they have now.
        payloads: Of the rollouts that this process owns now and the file holds, else None.
    """

    rest: dict[str, Any]
    decisions: bytes
    scalars: Any
    columns: dict[str, list[Any]]
    payloads: list[dict[str, Any] | None]


def _read(path: Path, rank: int, deal_to: int | None) -> _Shard:
    """Read one file; owners as saved, or dealt out anew to `deal_to` processes."""
    import pyarrow as pa

    try:
        data = _mapped(path)
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error}); {_ADVICE}") from error
    seal = _SEAL.search(data)
    if seal is None:
        raise StateError(f"{path} was not written by rollwise, or is damaged; {_ADVICE}")
    if not _is_whole(data, seal[0]):
        raise StateError(f"{path} is damaged: its checksum does not fit what it holds; {_ADVICE}")
    reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(data)))
    metadata: bytes = reader.schema.metadata[_METADATA_KEY]
    rest: dict[str, Any] = json.loads(metadata)
    del rest[_CHECKSUM_KEY]
    if rest["format"] != STATE_FORMAT:
        raise StateError(
            f"{path} has format {rest['format']!r}, this version reads {STATE_FORMAT}; use the version of rollwise "
            "that wrote it"
        )

    table = reader.read_all()
    scalars = table.select(_SCALARS).combine_chunks()
    columns = {name: scalars.column(name).to_pylist() for name in _SCALARS}
    for name in _FLOATS:
        i = scalars.column_names.index(name)
        bits = [chunk.view(pa.int64()) for chunk in scalars.column(i).chunks]
        scalars = scalars.set_column(i, name, pa.chunked_array(bits, pa.int64()))
    if deal_to is not None:
        columns["owner"] = [i % deal_to for i in range(table.num_rows)]
    payloads = _own_payloads(table, np.array(columns["owner"], dtype=np.int64) == rank)
    return _Shard(rest, _SEAL.sub(b"", metadata), scalars, columns, payloads)


def _own_payloads(table: Any, is_own_N: NDArray[np.bool_]) -> list[dict[str, Any] | None]:
    payloads: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    names = [name for name in table.column_names if name.startswith(_PAYLOAD)]
    first = 0
    for part in table.to_batches():
        for name in names:
            column, key = part.column(name), name.removeprefix(_PAYLOAD)
            is_wanted = column.is_valid().to_numpy(zero_copy_only=False) & is_own_N[first : first + len(column)]
            offsets, values = column.offsets.to_numpy().tolist(), column.values.to_numpy(zero_copy_only=False)
            for i in np.flatnonzero(is_wanted).tolist():
                # a view would keep the whole file in memory
                payloads[first + i][key] = values[offsets[i] : offsets[i + 1]].copy()
        first += part.num_rows
    return [payload or None for payload in payloads]
