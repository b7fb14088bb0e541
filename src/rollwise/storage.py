"""State files: the scheduler's state as Arrow IPC files, one per process.

A file is a table with one row per kept rollout; the rest of the state is JSON in its metadata. Nothing in it is
ever executed when it is read, and pandas, Polars and DuckDB open it. Payload arrays are columns named
`payload.<name>`, null where another process holds the payload. Needs pyarrow.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollwise.errors import StateError
from rollwise.rollout import Rollout

_METADATA_KEY = b"rollwise"
_FILE_NAME = "rollwise-{rank:05d}-of-{world_size:05d}.arrow"
_FILE_PATTERN = re.compile(r"rollwise-(\d{5})-of-(\d{5})\.arrow")
_TEXT = ("purpose",)
_FLOATS = ("reward", "advantage", "group_mean", "group_std")
_INTEGERS = ("birth_step", "num_tokens", "num_loss_tokens", "nbytes", "owner")


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
    """
    import pyarrow as pa

    rollouts: list[Rollout] = state["rollouts"]
    columns: dict[str, Any] = {}
    ids = [rollout.prompt_id for rollout in rollouts]
    columns["prompt_id"] = pa.array(ids, pa.int64() if all(isinstance(i, int) for i in ids) else pa.string())
    for names, kind in ((_TEXT, pa.string()), (_FLOATS, pa.float64()), (_INTEGERS, pa.int64())):
        for name in names:
            columns[name] = pa.array([getattr(rollout, name) for rollout in rollouts], kind)
    payloads = [rollout.payload if rollout.owner == rank else None for rollout in rollouts]
    for name in sorted({name for payload in payloads if payload is not None for name in payload}):
        columns[f"payload.{name}"] = _list_column([None if p is None else p.get(name) for p in payloads])

    rest = {key: value for key, value in state.items() if key != "rollouts"}
    table = pa.table(columns).replace_schema_metadata({_METADATA_KEY: json.dumps(rest)})
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _FILE_NAME.format(rank=rank, world_size=world_size)
    partial = path.with_name(path.name + ".partial")
    with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with open(partial, "rb") as written:
        os.fsync(written.fileno())
    os.replace(partial, path)
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
    files = {path: match for path in sorted(folder.glob("rollwise-*")) if (match := _FILE_PATTERN.fullmatch(path.name))}
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
            "saving was interrupted; resume from an earlier checkpoint"
        )
    saved_world = max(saved_worlds)

    state: dict[str, Any] | None = None
    for path in files:
        shard = _read(path)
        if state is None:
            state = shard
            continue
        if shard["step"] != state["step"] or len(shard["rollouts"]) != len(state["rollouts"]):
            raise StateError(
                f"{path} is of step {shard['step']} with {len(shard['rollouts'])} rollouts, the file of process 0 "
                f"of step {state['step']} with {len(state['rollouts'])}; resume from an earlier checkpoint"
            )
        for rollout, other in zip(state["rollouts"], shard["rollouts"], strict=True):
            if other.payload is not None:
                rollout.payload = other.payload
    assert state is not None
    for i, rollout in enumerate(state["rollouts"]):
        if saved_world != world_size:
            rollout.owner = i % world_size
        if rollout.owner != rank:
            rollout.payload = None
    return state


def _list_column(arrays: list[np.ndarray[Any, Any] | None]) -> Any:
    """One list per row, null for None. All arrays have the same dtype."""
    import pyarrow as pa

    lengths = np.array([0 if array is None else len(array) for array in arrays], dtype=np.int64)
    present = [array for array in arrays if array is not None]
    values = np.concatenate(present) if present else np.zeros(0)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    missing = np.array([array is None for array in arrays])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values), mask=pa.array(missing))


def _read(path: Path) -> dict[str, Any]:
    import pyarrow as pa

    advice = "resume from an earlier checkpoint"
    try:
        with pa.OSFile(str(path), "rb") as source:
            table = pa.ipc.open_file(source).read_all().combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowIOError) as error:
        raise StateError(f"{path} is damaged or no Arrow file ({error}); {advice}") from error
    metadata = (table.schema.metadata or {}).get(_METADATA_KEY)
    if metadata is None:
        raise StateError(f"{path} was not written by rollwise; {advice}")
    state: dict[str, Any] = json.loads(metadata)
    missing = {"prompt_id", *_TEXT, *_FLOATS, *_INTEGERS} - set(table.column_names)
    if missing:
        raise StateError(f"{path} lacks the columns {sorted(missing)}; {advice}")

    columns = {name: table.column(name).to_pylist() for name in ("prompt_id", *_TEXT, *_FLOATS, *_INTEGERS)}
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
