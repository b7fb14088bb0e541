"""Rows between TransferQueue and arrays.

verl's agent loop leaves what it generates in the partition "train". Rows to train on are written to a partition of our
own, whose rows all have the same fields. Both ends may be anywhere in the Ray cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from tensordict import NonTensorData
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rollwise.diagnostics import row_entries
from rollwise.verl.rows import (
    READ_FIELDS,
    Place,
    RowArrays,
    behaviour_log_probs,
    pieces,
    tag,
    to_arrays,
    to_rows,
)

GENERATED = "train"
#: Partition of the rows that are trained on.
TRAINED = "rollwise"
#: Key of the row that stands for a batch without rows.
PLACEHOLDER = "nothing_0_0"


def connect() -> None:
    """Join the run's TransferQueue; an actor's first call."""
    tq.init()


def read(sessions: Sequence[Sequence[str]]) -> list[RowArrays]:
    """Take generated rollouts, each given by the keys of its rows; they leave the queue."""
    keys = [key for session in sessions for key in session]
    if not keys:
        return []
    rows = get(keys, GENERATED, READ_FIELDS)
    tq.kv_clear(keys=keys, partition_id=GENERATED)
    taken, start = [], 0
    for session in sessions:
        taken.append(to_arrays(rows[start : start + len(session)]))
        start += len(session)
    return taken


def write(rollouts: Sequence[RowArrays], places: Sequence[Place]) -> tuple[list[str], list[dict[str, Any]]]:
    """Write rows to train on; returns their keys and tags."""
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    fields: list[dict[str, Any]] = []
    for arrays, place in zip(rollouts, places, strict=True):
        rows = to_rows(arrays)
        keys += place.keys(len(rows))
        tags += [tag(len(row["prompts"]), len(row["responses"]), place.version) for row in rows]
        fields += [row | {"uid": place.uid, "session_id": place.session} for row in rows]
    if keys:
        tq.kv_batch_put(keys=keys, partition_id=TRAINED, fields=list_of_dict_to_tensordict(fields), tags=tags)
    return keys, tags


def settle_log_probs(
    rollouts: Sequence[RowArrays], places: Sequence[Place], *, replaces_old: bool, clip: tuple[float, float]
) -> NDArray[np.float64]:
    """Compare what the trained model makes of the rows, now that it has read them, with the behaviour policy's.

    Of fresh rollouts, whose behaviour policy is the one that is being trained, its log-probs are kept. In the others'
    rows they are replaced by the behaviour policy's, so that the ratio in verl's loss is the one to it.

    Args:
        rollouts: The rollouts; those of age 0 gain `old_log_probs`.
        places: Where they stand.
        replaces_old: Whether to keep and to replace log-probs at all. Not where verl's rollout_correction weighs by
            the difference: there the rows need the current ones.
        clip: Lower and upper bound of the ratio, for the share that is cut off.

    Returns:
        Per row, what `rollwise.diagnostics.row_entries` makes of it.
    """
    keys = [k for r, p in zip(rollouts, places, strict=True) for k in p.keys(len(r["response_lengths"]))]
    if not keys:
        return np.zeros((0, 7))
    current = [row["old_log_probs"].float().numpy() for row in get(keys, TRAINED, ("old_log_probs",))]
    start, stale_keys, stale_fields, entries = 0, [], [], []
    for arrays, place in zip(rollouts, places, strict=True):
        num_rows = len(arrays["response_lengths"])
        mine, mine_keys = current[start : start + num_rows], keys[start : start + num_rows]
        start += num_rows
        if replaces_old and place.age_steps == 0:
            arrays["old_log_probs"] = np.concatenate(mine).astype(np.float32)
        behaviour = behaviour_log_probs(arrays)
        log_ratios_T, mask_T = np.concatenate(mine) - behaviour, arrays["response_mask"] > 0
        ratios_T = np.exp(np.clip(log_ratios_T, -50, 50))
        clipped_T = ratios_T > clip[1] if place.advantage > 0 else ratios_T < clip[0]
        entries.append(row_entries([place.age_steps], log_ratios_T[None], mask_T[None], clipped_T[None]))
        if place.age_steps and replaces_old:
            stale_keys += mine_keys
            by_row = pieces(dict(arrays, behaviour=behaviour), "behaviour")
            stale_fields += [{"old_log_probs": torch.from_numpy(piece.copy())} for piece in by_row]
    if stale_keys:
        tq.kv_batch_put(keys=stale_keys, partition_id=TRAINED, fields=list_of_dict_to_tensordict(stale_fields))
    return np.concatenate(entries)


def get(keys: Sequence[str], partition: str, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Fields of rows as far as there are any, one mapping a row."""
    data = tq.kv_batch_get(keys=list(keys), partition_id=partition, select_fields=list(fields))
    columns = {name: _column(data.get(name)) for name in data.keys()}  # noqa: SIM118 - no mapping, but a TensorDict
    return [{name: column[i] for name, column in columns.items()} for i in range(len(keys))]


def get_as_far_as(keys: Sequence[str], partition: str, fields: Sequence[str], wanted: str) -> list[dict[str, Any]]:
    """As `get`, for rows of which some lack the field `wanted`.

    TransferQueue leaves a field out of all rows that are read together if one of them has none; so they are halved
    until those without it stand alone.
    """
    if not keys:
        return []
    rows = get(keys, partition, (*fields, wanted))
    if len(keys) == 1 or wanted in rows[0]:
        return rows
    half = len(keys) // 2
    return [row for part in (keys[:half], keys[half:]) for row in get_as_far_as(part, partition, fields, wanted)]


def _column(value: Any) -> list[Any]:
    """One entry a row, of a tensor, of a nested one, or of anything else."""
    if isinstance(value, torch.Tensor):
        return list(value.unbind(0))
    return [item.data if isinstance(item, NonTensorData) else item for item in value]


def clear(keys: Sequence[str], partition: str) -> None:
    """Remove rows."""
    if keys:
        tq.kv_clear(keys=list(keys), partition_id=partition)


def write_placeholder(partition: str) -> None:
    """Write a row that says nothing, for TransferQueue refuses to clear none."""
    fields = list_of_dict_to_tensordict([{"response_mask": torch.zeros(1)}])
    tq.kv_batch_put(keys=[PLACEHOLDER], partition_id=partition, fields=fields, tags=[{}])


def put(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write fields of rows that are trained on."""
    if keys:
        fields = list_of_dict_to_tensordict([dict(row) for row in rows])
        tq.kv_batch_put(keys=list(keys), partition_id=TRAINED, fields=fields)
