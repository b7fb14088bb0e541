"""TRL's batches as unpadded rows, and rows as batches again.

A row is a mapping from names to one-dimensional numpy arrays: what `Rollout.payload` holds. TRL pads prompts on
the left and completions on the right; rows are stored without padding, so that a long rollout costs its own
length and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollwise.errors import InexactSettingError

RowArrays = dict[str, NDArray[Any]]

#: Keys of TRL's batch that become arrays of a row: name -> (side it is padded on, padding value, dtype). The
#: value "pad" stands for the tokenizer's pad token.
LAYOUT: dict[str, tuple[str, int | float | str, Any]] = {
    "prompt_ids": ("left", "pad", np.int32),
    "completion_ids": ("right", "pad", np.int32),
    "completion_mask": ("right", 0, np.uint8),
    "tool_mask": ("right", 1, np.uint8),
    "old_per_token_logps": ("right", 0.0, np.float32),
    "sampling_per_token_logps": ("right", 0.0, np.float32),
    "importance_sampling_ratio": ("right", 1.0, np.float32),
}
#: Keys that are derived again when a batch is built.
_DERIVED = ("prompt_mask", "advantages", "num_items_in_batch")


def batch_to_rows(batch: Mapping[str, Any]) -> list[RowArrays]:
    """Cut TRL's batch into unpadded rows on the CPU.

    Args:
        batch: What `GRPOTrainer._generate_and_score_completions` returned.

    Returns:
        One row per completion, in order. A `importance_sampling_ratio` of one value per sequence stays one value.

    Raises:
        InexactSettingError: If the batch holds a key this version does not know, such as images.
    """
    unknown = {key for key, value in batch.items() if value is not None} - set(LAYOUT) - set(_DERIVED)
    if unknown:
        import trl

        raise InexactSettingError(
            f"TRL {trl.__version__} returned batch keys that cannot be stored as rows yet: {sorted(unknown)}; "
            "turn replay and allocation off for this model"
        )
    prompt_mask = batch["prompt_mask"].bool().cpu().numpy()
    # Completions are contiguous from the left. Where truncated ones are masked out, the mask hides their length;
    # they carry no loss, and one token keeps the row well-formed.
    lengths = batch["completion_mask"].sum(1).clamp(min=1).cpu().numpy()
    completion_mask = np.arange(batch["completion_ids"].shape[1]) < lengths[:, None]
    rows: list[RowArrays] = [{} for _ in range(len(lengths))]
    for key, (side, _, dtype) in LAYOUT.items():
        value = batch.get(key)
        if value is None:
            continue
        value = value.detach().cpu()
        array = (value.float() if value.is_floating_point() else value).numpy().astype(dtype)
        if side == "right" and array.shape[1] == 1 and completion_mask.shape[1] > 1:
            mask = np.ones_like(array, dtype=bool)
        else:
            mask = prompt_mask if side == "left" else completion_mask
        pieces = np.split(array[mask], np.cumsum(mask.sum(1))[:-1])
        for row, piece in zip(rows, pieces, strict=True):
            row[key] = piece.copy()  # a view would keep the whole batch in memory
    return rows


def neutral_row(pad_token_id: int, like: Mapping[str, Any] | None = None) -> RowArrays:
    """A row without loss tokens: one prompt token and one masked completion token, keys as in `like`."""
    row: RowArrays = {}
    for key in like if like is not None else ("prompt_ids", "completion_ids", "completion_mask", "old_per_token_logps"):
        _, padding, dtype = LAYOUT[key]
        row[key] = np.full(1, pad_token_id if padding == "pad" else padding, dtype=dtype)
    row["completion_mask"] = np.zeros(1, dtype=np.uint8)
    return row


def rows_to_batch(
    rows: Sequence[RowArrays],
    *,
    pad_token_id: int,
    device: torch.device,
    pad_to_multiple_of: int | None = None,
    per_sequence_ratio: bool = False,
) -> dict[str, torch.Tensor]:
    """Pad rows into TRL's batch, without `advantages` and `num_items_in_batch`.

    Args:
        rows: At least one row; all with the same keys, but for `tool_mask`, which defaults to ones.
        pad_token_id: The tokenizer's pad token.
        device: Where the tensors go.
        pad_to_multiple_of: Pad lengths to a multiple of this, as TRL's setting of the same name.
        per_sequence_ratio: Whether `importance_sampling_ratio` holds one value per sequence.
    """
    batch: dict[str, torch.Tensor] = {}
    present = {key for row in rows for key in row}
    for key, (side, padding, dtype) in LAYOUT.items():
        if key not in present:
            continue
        lengths_key = "prompt_ids" if side == "left" else "completion_ids"
        arrays = [row[key] if key in row else np.ones(len(row[lengths_key]), dtype=dtype) for row in rows]
        if key == "importance_sampling_ratio" and per_sequence_ratio:
            lengths = np.ones(len(rows), dtype=np.int64)
            width = 1
        else:
            lengths = np.array([len(array) for array in arrays])
            width = int(lengths.max())
            if pad_to_multiple_of:
                width = -(-width // pad_to_multiple_of) * pad_to_multiple_of
        columns = np.arange(width)
        mask = columns < lengths[:, None] if side == "right" else columns >= width - lengths[:, None]
        padded = np.full((len(rows), width), pad_token_id if padding == "pad" else padding, dtype=dtype)
        padded[mask] = np.concatenate(arrays)
        tensor = torch.from_numpy(padded)
        batch[key] = (tensor if tensor.is_floating_point() else tensor.long()).to(device)
        if key == "prompt_ids":
            batch["prompt_mask"] = torch.from_numpy(mask).long().to(device)
    return batch


def row_nbytes(row: Mapping[str, NDArray[Any]]) -> int:
    """Bytes of a row's arrays."""
    return sum(array.nbytes for array in row.values())


def loss_tokens(row: Mapping[str, NDArray[Any]]) -> int:
    """Tokens of a row that carry loss."""
    mask = row["completion_mask"]
    return int((mask & row["tool_mask"]).sum() if "tool_mask" in row else mask.sum())
