"""State files: the scheduler's state as Arrow IPC files, one per process.

A file is a table with one row per kept rollout; the rest of the state is JSON in its metadata. Nothing in it is
ever executed when it is read, and pandas, Polars and DuckDB open it. Payload arrays are columns named
`payload.<name>`, null where another process holds the payload. Needs pyarrow.

The JSON also holds a CRC-32 of the whole file, taken while its own digits are zeros. It is checked before anything is
parsed: Arrow itself follows damaged offsets out of bounds, and would not notice a changed number at all.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
    columns: dict[str, Any] = {}
    ids = [rollout.prompt_id for rollout in rollouts]
    columns["prompt_id"] = pa.array(ids, pa.string() if any(isinstance(i, str) for i in ids) else pa.int64())
    for names, kind in ((_TEXT, pa.string()), (_FLOATS, pa.float64()), (_INTEGERS, pa.int64())):
        for name in names:
            columns[name] = pa.array([getattr(rollout, name) for rollout in rollouts], kind)
    payloads = [_checked_payload(rollout) if rollout.owner == rank else None for rollout in rollouts]
    for name in sorted({name for payload in payloads if payload is not None for name in payload}):
        columns[f"payload.{name}"] = _list_column(name, [None if p is None else p.get(name) for p in payloads])

    rest = {_CHECKSUM_KEY: f"{0:08x}"} | {key: value for key, value in state.items() if key != "rollouts"}
    table = pa.table(columns).replace_schema_metadata({_METADATA_KEY: json.dumps(rest)})
    folder = Path(folder)
    path = folder / _FILE_NAME.format(rank=rank, world_size=world_size)
    with replacing(path) as partial:
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        with open(partial, "r+b") as written:
            _seal(written.fileno())
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

    first, *others = files
    state = _read(first)
    for path in others:
        shard = _read(path)
        if _decisions(shard) != _decisions(state):
            raise StateError(
                f"{path} (step {shard['step']}, {len(shard['rollouts'])} rollouts) and {first} (step {state['step']}, "
                f"{len(state['rollouts'])} rollouts) are not of the same save; {_ADVICE}"
            )
        for rollout, other in zip(state["rollouts"], shard["rollouts"], strict=True):
            if other.payload is not None:
                rollout.payload = other.payload
    for i, rollout in enumerate(state["rollouts"]):
        if saved_world != world_size:
            rollout.owner = i % world_size
        if rollout.owner != rank:
            rollout.payload = None
    return state


def _state_files(folder: Path) -> dict[Path, re.Match[str]]:
    """State files in the order of their processes, with rank and number of processes."""
    return {path: match for path in sorted(folder.glob("rollwise-*")) if (match := _FILE_PATTERN.fullmatch(path.name))}


def _decisions(state: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What is the same in the files of all processes; as text, because NaN is not equal to itself."""
    rest = {key: value for key, value in state.items() if key != "rollouts"}
    return rest, repr([[getattr(rollout, name) for name in _SCALARS] for rollout in state["rollouts"]])


def _checked_payload(rollout: Rollout) -> Mapping[str, Any] | None:
    payload = rollout.payload
    if payload is None or (
        isinstance(payload, Mapping)
        and all(isinstance(name, str) for name in payload)
        and all(isinstance(a, np.ndarray) and a.ndim == 1 and a.dtype.kind in "biuf" for a in payload.values())
    ):
        return payload
    raise StateError(
        f"the payload of a rollout of prompt {rollout.prompt_id!r} cannot be saved; it must be a mapping from names to "
        "one-dimensional numpy arrays of numbers, or None"
    )


def _list_column(name: str, arrays: list[np.ndarray[Any, Any] | None]) -> Any:
    """One list per row, null for None."""
    import pyarrow as pa

    lengths = np.array([0 if array is None else len(array) for array in arrays], dtype=np.int64)
    present = [array for array in arrays if array is not None]
    if len(dtypes := {str(array.dtype) for array in present}) > 1:
        raise StateError(f"the payload arrays {name!r} have the dtypes {sorted(dtypes)}; give all of them the same")
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    missing = np.array([array is None for array in arrays])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(present)), mask=pa.array(missing))


def _seal(file_number: int) -> None:
    """Put the file's checksum in the place of the zeros."""
    with mmap.mmap(file_number, 0) as data:
        digits = f"{zlib.crc32(data):08x}".encode()
        for match in list(re.finditer(re.escape(_UNSEALED), data)):
            data[match.end() - 9 : match.end() - 1] = digits
        data.flush()


def _is_whole(data: bytes, seal: bytes) -> bool:
    checksum, start = 0, 0
    view = memoryview(data)
    for match in re.finditer(re.escape(seal), data):
        checksum = zlib.crc32(_UNSEALED, zlib.crc32(view[start : match.start()], checksum))
        start = match.end()
    return f'"{zlib.crc32(view[start:], checksum):08x}"'.encode() in seal


def _read(path: Path) -> dict[str, Any]:
    import pyarrow as pa

    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error}); {_ADVICE}") from error
    seal = _SEAL.search(data)
    if seal is None:
        raise StateError(f"{path} was not written by rollwise, or is damaged; {_ADVICE}")
    if not _is_whole(data, seal[0]):
        raise StateError(f"{path} is damaged: its checksum does not fit what it holds; {_ADVICE}")
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all().combine_chunks()
    state: dict[str, Any] = json.loads(table.schema.metadata[_METADATA_KEY])
    del state[_CHECKSUM_KEY]
    if state["format"] != STATE_FORMAT:
        raise StateError(
            f"{path} has format {state['format']!r}, this version reads {STATE_FORMAT}; use the version of rollwise "
            "that wrote it"
        )

    columns = {name: table.column(name).to_pylist() for name in _SCALARS}
    payloads: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    for name in table.column_names:
        if name.startswith("payload.") and table.num_rows:
            column = table.column(name).chunk(0)
            offsets, values = column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False)
            for i in np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)):
                payloads[i][name.removeprefix("payload.")] = values[offsets[i] : offsets[i + 1]].copy()
    state["rollouts"] = [
        Rollout(**{name: values[i] for name, values in columns.items()}, payload=payloads[i] or None)
        for i in range(table.num_rows)
    ]
    return state
