"""A scheduler's batch as the dict that TRL's loss reads, on every process."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from rollwise.rollout import Batch, Row
from rollwise.trl.corrections import REPLAYED_KEY
from rollwise.trl.rows import RowArrays, neutral_row, rows_to_batch
from rollwise.trl.staleness import AGE_KEY


def pack(
    batch: Batch,
    *,
    accelerator: Accelerator,
    num_pieces: int,
    is_row_mean: bool,
    pad_token_id: int,
    pad_to_multiple_of: int | None,
    per_sequence_ratio: bool,
    template: RowArrays | None = None,
) -> dict[str, Any]:
    """This process's part of the batch: as many rows as on every other one, a multiple of `num_pieces`.

    TRL cuts its part into `num_pieces` micro-batches and drops what does not divide. Neutral rows without loss tokens
    level the counts. A token-mean loss is told the batch's own number of tokens. A row-mean loss divides by all N
    rows, neutral ones included; every such loss is linear in the advantage, so the advantages are scaled by
    N / normalizer_rows.

    Args:
        batch: The scheduler's batch, the same on every process.
        accelerator: Tells the processes apart and gathers what has to travel.
        num_pieces: TRL's `steps_per_generation`.
        is_row_mean: Whether the loss is a mean over rows; otherwise over tokens.
        pad_token_id: See `rows_to_batch`.
        pad_to_multiple_of: See `rows_to_batch`.
        per_sequence_ratio: See `rows_to_batch`.
        template: What neutral rows are made like. None: like the first row.
    """
    world_size, device = accelerator.num_processes, accelerator.device
    rows_per_process = max(1, -(-len(batch.rows) // (world_size * num_pieces))) * num_pieces
    mine, rows = _deal(batch, rows_per_process, accelerator)
    num_neutral = rows_per_process - len(rows)
    if template is None and rows:
        template = rows[0]
    rows += [neutral_row(pad_token_id, like=template)] * num_neutral
    output: dict[str, Any] = rows_to_batch(
        rows,
        pad_token_id=pad_token_id,
        device=device,
        pad_to_multiple_of=pad_to_multiple_of,
        per_sequence_ratio=per_sequence_ratio,
    )
    scale = rows_per_process * world_size / max(batch.normalizer_rows, 1) if is_row_mean else 1.0
    output["advantages"] = torch.tensor(
        [row.advantage * row.weight * scale for row in mine] + [0.0] * num_neutral, device=device
    )
    ages = [row.age_steps for row in mine] + [0] * num_neutral
    output[AGE_KEY] = torch.tensor(ages, device=device)
    is_replayed = [row.source == "replay" for row in mine] + [False] * num_neutral
    output[REPLAYED_KEY] = torch.tensor(is_replayed, device=device)
    output["num_items_in_batch"] = torch.tensor(max(batch.normalizer_tokens, 1), device=device)
    return output


def _deal(batch: Batch, rows_per_process: int, accelerator: Accelerator) -> tuple[list[Row], list[RowArrays]]:
    """This process's rows, and what is stored of them.

    A row stays where it was made unless that process is full: only the others travel.
    """
    rank = accelerator.process_index
    owners = [row.rollout.owner for row in batch.rows]
    room = [rows_per_process] * accelerator.num_processes
    destinations: list[int | None] = []
    for owner in owners:
        destinations.append(owner if room[owner] else None)
        room[owner] -= bool(room[owner])
    for i, destination in enumerate(destinations):
        if destination is None:
            emptiest = max(range(len(room)), key=room.__getitem__)
            destinations[i] = emptiest
            room[emptiest] -= 1

    received: dict[int, RowArrays] = {}
    travelling = [i for i, owner in enumerate(owners) if destinations[i] != owner]
    if travelling:  # every process comes to the same list, so that all or none call the collective
        sent = [(i, batch.rows[i].rollout.payload) for i in travelling if owners[i] == rank]
        received = {i: row for i, row in gather_object(sent) if destinations[i] == rank}
    mine = [i for i, destination in enumerate(destinations) if destination == rank]
    rows = [received[i] if i in received else batch.rows[i].rollout.payload for i in mine]
    return [batch.rows[i] for i in mine], rows
