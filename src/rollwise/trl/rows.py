"""TRL's batches as unpadded rows, and rows as batches again.

A row is a mapping from names to one-dimensional numpy arrays: what `Rollout.payload` holds. TRL pads prompts on
the left and completions on the right; rows are stored without padding, so that a long rollout costs its own
length and no more.

Image tensors have more axes, whose first one runs over all images (patches, tiles) of a batch. A row holds its own
part of it, flattened and without the zeros at its end, under the tensor's name, and its shape under that name with
`.shape` behind: `pixel_values` and `pixel_values.shape`. A row without images has neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rollwise.errors import InexactSettingError

RowArrays = dict[str, NDArray[Any]]

#: Keys of TRL's batch that become arrays of a row: name -> (layout, padding value, dtype).
#: Layouts: "left" and "right" are matrices of prompts and of completions, padded on that side; "types" are matrices
#: over prompt and completion, whose part over the completion is stored only where it marks images there (those of later
#: turns); "images" are tensors cut into rows as `_cut_images` says; "count" are lists of one integer per row.
#: The padding value "pad" stands for the tokenizer's pad token.
LAYOUT: dict[str, tuple[str, int | float | str, Any]] = {
    "prompt_ids": ("left", "pad", np.int32),
    "completion_ids": ("right", "pad", np.int32),
    "completion_mask": ("right", 0, np.uint8),
    "tool_mask": ("right", 1, np.uint8),
    "old_per_token_logps": ("right", 0.0, np.float32),
    "sampling_per_token_logps": ("right", 0.0, np.float32),
    "importance_sampling_ratio": ("right", 1.0, np.float32),
    "token_type_ids": ("types", 0, np.uint8),
    "mm_token_type_ids": ("types", 0, np.uint8),
    "pixel_values": ("images", 0.0, np.float32),
    "pixel_attention_mask": ("images", 0, np.uint8),
    "image_grid_thw": ("images", 0, np.int32),
    "image_sizes": ("images", 0, np.int32),
    "image_position_ids": ("images", -1, np.int32),
    "num_images": ("count", 0, np.int32),
    "num_tiles": ("count", 0, np.int32),
}
_SHAPE = ".shape"
#: Keys of a neutral row that is made like no other: all that a loss of TRL's reads of a text-only row.
_NEUTRAL = ("prompt_ids", "completion_ids", "completion_mask", "old_per_token_logps", "importance_sampling_ratio")
#: Keys that are derived again when a batch is built.
_DERIVED = ("prompt_mask", "advantages", "num_items_in_batch")


def batch_to_rows(batch: Mapping[str, Any]) -> list[RowArrays]:
    """Cut TRL's batch into unpadded rows on the CPU.

    Args:
        batch: What `GRPOTrainer._generate_and_score_completions` returned.

    Returns:
        One row per completion, in order. A `importance_sampling_ratio` of one value per sequence stays one value.

    Raises:
        InexactSettingError: If the batch holds a key this version does not know, or images that cannot be told apart.
    """
    unknown = {key for key, value in batch.items() if value is not None} - set(LAYOUT) - set(_DERIVED)
    if unknown:
        raise InexactSettingError(
            f"TRL {_trl_version()} returned batch keys that cannot be stored as rows yet: {sorted(unknown)}; "
            "turn replay and allocation off for this model"
        )
    prompt_mask = batch["prompt_mask"].bool().cpu().numpy()
    # Completions are contiguous from the left. Where truncated ones are masked out, the mask hides their length;
    # they carry no loss, and one token keeps the row well-formed.
    lengths = batch["completion_mask"].sum(1).clamp(min=1).cpu().numpy()
    completion_mask = np.arange(batch["completion_ids"].shape[1]) < lengths[:, None]
    rows: list[RowArrays] = [{} for _ in range(len(lengths))]
    for key, (layout, _, dtype) in LAYOUT.items():
        value = batch.get(key)
        if value is None or layout in ("images", "count"):
            continue
        array = _to_numpy(value, dtype)
        if layout == "types":
            _add_types(rows, key, array, prompt_mask, completion_mask)
            continue
        if layout == "right" and array.shape[1] == 1 and completion_mask.shape[1] > 1:
            mask = np.ones_like(array, dtype=bool)
        else:
            mask = completion_mask if layout == "right" else prompt_mask
        pieces = np.split(array[mask], np.cumsum(mask.sum(1))[:-1])
        for row, piece in zip(rows, pieces, strict=True):
            row[key] = piece.copy()  # a view would keep the whole batch in memory
    if batch.get("pixel_values") is not None:
        _add_images(rows, batch)
    return rows


def _add_images(rows: Sequence[RowArrays], batch: Mapping[str, Any]) -> None:
    for key, pieces in _cut_images(batch, len(rows)).items():
        for row, piece in zip(rows, pieces, strict=True):
            if len(piece):
                flat = _to_numpy(piece, LAYOUT[key][2]).ravel()
                is_used = flat.view(f"u{flat.itemsize}") != 0  # by bits: -0.0 is no padding
                num_used = len(flat) - int(is_used[::-1].argmax()) if is_used.any() else 0
                row[key] = flat[:num_used].copy()  # a view would keep the whole batch in memory
                row[key + _SHAPE] = np.array(piece.shape, dtype=np.int64)
    for key, (layout, _, dtype) in LAYOUT.items():
        if layout == "count" and batch.get(key) is not None:
            for row, count in zip(rows, batch[key], strict=True):
                if "pixel_values" in row:
                    row[key] = np.array([count], dtype=dtype)


def _cut_images(batch: Mapping[str, Any], num_rows: int) -> dict[str, Sequence[torch.Tensor]]:
    """Image tensors cut along their first axis: per key, one piece per row.

    TRL's own function knows what that axis runs over: patches (Qwen-VL), images (LLaVA, Gemma), tiles (InternVL).
    Where there is a `pixel_attention_mask` (Idefics, SmolVLM) it runs over rows, and the second axis over a row's
    images, padded with zeros to the most that a row has.
    """
    from trl.trainer.utils import split_pixel_values_by_grid

    is_padded = batch.get("pixel_attention_mask") is not None
    present = {key: value for key, value in batch.items() if value is not None}
    cut = present if is_padded else split_pixel_values_by_grid(present)
    images = {key: cut[key] for key, (layout, _, _) in LAYOUT.items() if layout == "images" and key in cut}
    if batch.get("num_images") is None or any(len(value) != num_rows for value in images.values()):
        shapes = {key: tuple(batch[key].shape) for key in images}
        raise InexactSettingError(
            f"TRL {_trl_version()} returned images that cannot be told apart, {shapes} for {num_rows} rows; "
            "update TRL, give one image per prompt, or turn replay and allocation off"
        )
    return {
        key: value if isinstance(value, list) else [value[i : i + 1] for i in range(num_rows)]
        for key, value in images.items()
    }


def _add_types(
    rows: Sequence[RowArrays], key: str, array: NDArray[Any], prompt_mask: NDArray[Any], completion_mask: NDArray[Any]
) -> None:
    prompts, completions = np.split(array, [prompt_mask.shape[1]], axis=1)
    for i, row in enumerate(rows):
        marks = completions[i][completion_mask[i]]
        parts = [prompts[i][prompt_mask[i]]] + ([marks] if marks.any() else [])
        row[key] = np.concatenate(parts)


def _to_numpy(value: torch.Tensor, dtype: Any) -> NDArray[Any]:
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy().astype(dtype, copy=False)


def _trl_version() -> str:
    import trl

    return str(trl.__version__)


def neutral_row(pad_token_id: int, like: Mapping[str, Any] | None = None) -> RowArrays:
    """A row without loss tokens: one masked completion token after a prompt of one token, keys as in `like`.

    Where `like` has images the neutral row has its prompt and its images: a micro-batch of neutral rows alone still
    goes through the vision tower, which processes that share its parameters count on. Where images may be those of
    later turns it is `like` as a whole, with every token masked.
    """
    has_images = like is not None and "pixel_values" in like
    if like is not None and has_images and "tool_mask" in like:
        return {**like, "tool_mask": np.zeros_like(like["tool_mask"])}
    row: RowArrays = {}
    for key in like if like is not None else _NEUTRAL:
        layout, padding, dtype = LAYOUT[key.removesuffix(_SHAPE)]
        if like is not None and has_images and layout != "right":
            row[key] = like[key]
        else:
            row[key] = np.full(1, pad_token_id if padding == "pad" else padding, dtype=dtype)
    row["completion_mask"] = np.zeros(1, dtype=np.uint8)
    return row


def neutral_template(rows: Sequence[RowArrays]) -> RowArrays:
    """Of at least one row the smallest with images, or the smallest if none has any: what `neutral_row` takes."""
    return min(rows, key=lambda row: ("pixel_values" not in row, row_nbytes(row)))


def rows_to_batch(
    rows: Sequence[RowArrays],
    *,
    pad_token_id: int,
    device: torch.device,
    pad_to_multiple_of: int | None = None,
    per_sequence_ratio: bool = False,
) -> dict[str, Any]:
    """Pad rows into TRL's batch, without `advantages` and `num_items_in_batch`.

    Args:
        rows: At least one row; all with the same keys, but for `tool_mask`, which defaults to ones, and for images.
        pad_token_id: The tokenizer's pad token.
        device: Where the tensors go.
        pad_to_multiple_of: Pad lengths to a multiple of this, as TRL's setting of the same name.
        per_sequence_ratio: Whether `importance_sampling_ratio` holds one value per sequence.

    Raises:
        InexactSettingError: If the images of the rows cannot stand in one batch.
    """
    batch: dict[str, Any] = {}
    present = {key for row in rows for key in row}
    for key, (layout, padding, dtype) in LAYOUT.items():
        if key not in present or layout in ("images", "count"):
            continue
        is_one_ratio = key == "importance_sampling_ratio" and per_sequence_ratio
        side: Literal["left", "right"] = "left" if layout == "left" else "right"
        fill = pad_token_id if padding == "pad" else padding
        multiple = None if is_one_ratio else pad_to_multiple_of
        if layout == "types":
            lengths = [len(row["prompt_ids"]) for row in rows]
            types = [row[key] if key in row else np.zeros(n, dtype=dtype) for row, n in zip(rows, lengths, strict=True)]
            prompts = [array[:length] for array, length in zip(types, lengths, strict=True)]
            completions = [array[length:] for array, length in zip(types, lengths, strict=True)]
            right, _ = _padded(completions, "right", fill, dtype, width=batch["completion_ids"].shape[1])
            padded = np.concatenate([_padded(prompts, "left", fill, dtype, multiple=multiple)[0], right], axis=1)
        else:
            lengths_key = "completion_ids" if layout == "right" else "prompt_ids"
            arrays = [row[key] if key in row else np.ones(len(row[lengths_key]), dtype=dtype) for row in rows]
            if is_one_ratio:
                arrays = [array[:1] for array in arrays]
            padded, mask = _padded(arrays, side, fill, dtype, multiple=multiple)
            if key == "prompt_ids":
                batch["prompt_mask"] = torch.from_numpy(mask).long().to(device)
        tensor = torch.from_numpy(padded)
        batch[key] = (tensor if tensor.is_floating_point() else tensor.long()).to(device)
    return batch | _images_to_batch(rows, present, device)


def _padded(
    arrays: Sequence[NDArray[Any]],
    side: Literal["left", "right"],
    fill: Any,
    dtype: Any,
    *,
    width: int = 0,
    multiple: int | None = None,
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Arrays as one matrix, padded on a side to at least `width` columns, and where in it they stand."""
    lengths = np.array([len(array) for array in arrays])
    width = max(width, int(lengths.max()))
    if multiple:
        width = -(-width // multiple) * multiple
    columns = np.arange(width)
    mask = columns < lengths[:, None] if side == "right" else columns >= width - lengths[:, None]
    padded = np.full((len(arrays), width), fill, dtype=dtype)
    padded[mask] = np.concatenate(arrays)
    return padded, mask


def _images_to_batch(rows: Sequence[RowArrays], present: set[str], device: torch.device) -> dict[str, Any]:
    """Image tensors of the rows and what TRL needs to cut them, in the form in which TRL returns them."""
    if "pixel_values" not in present:
        return {}
    batch: dict[str, Any] = {}
    is_padded = "pixel_attention_mask" in present
    for key, (layout, padding, dtype) in LAYOUT.items():
        if layout == "count" and key in present:
            batch[key] = [_count(row, key) for row in rows]
        if layout != "images" or key not in present:
            continue
        num_axes = max(len(row[key + _SHAPE]) for row in rows if key in row)
        # Where the first axis runs over rows, a row without images has an entry too, which is all padding.
        nothing = np.empty((int(is_padded),) + (0,) * (num_axes - 1), dtype=dtype)
        arrays = [_image_array(row, key) if key in row else nothing for row in rows]
        widest = np.max([array.shape[1:] for array in arrays], axis=0)
        says_its_size = is_padded or "image_sizes" in present
        if not says_its_size and any(len(array) and array.shape[2:] != tuple(widest[1:]) for array in arrays):
            raise InexactSettingError(
                f"the rows' {key} have the shapes {sorted({array.shape for array in arrays})}, and nothing tells the "
                "model which part of a padded image is real; resize all images to one size, or turn replay and "
                "allocation off"
            )
        padded = np.full((sum(len(array) for array in arrays), *widest), padding, dtype=dtype)
        start = 0
        for array in arrays:
            padded[(slice(start, start + len(array)), *(slice(size) for size in array.shape[1:]))] = array
            start += len(array)
        tensor = torch.from_numpy(padded)
        batch[key] = (tensor if tensor.is_floating_point() else tensor.long()).to(device)
    if is_padded:  # one entry per row, which TRL would take for one per image where the two numbers happen to agree
        batch["num_images"] = [1] * len(rows)
    return batch


def _image_array(row: RowArrays, key: str) -> NDArray[Any]:
    flat, shape = row[key], row[key + _SHAPE]
    num_zeros = int(shape.prod()) - len(flat)
    return (np.pad(flat, (0, num_zeros)) if num_zeros else flat).reshape(shape)


def _count(row: RowArrays, key: str) -> int:
    """Images or tiles of a row. TRL leaves `num_tiles` out of a batch in which every image is a single tile."""
    if key in row:
        return int(row[key][0])
    return int(row["pixel_values" + _SHAPE][0]) if "pixel_values" in row else 0


def without_empty_images(batch: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch as it is, or without its image keys if none of its rows has an image: models refuse no images."""
    pixel_values, mask = batch.get("pixel_values"), batch.get("pixel_attention_mask")
    if pixel_values is None or (pixel_values.numel() if mask is None else mask.any()):
        return batch
    return {key: value for key, value in batch.items() if LAYOUT.get(key, ("",))[0] not in ("images", "count")}


def row_nbytes(row: Mapping[str, NDArray[Any]]) -> int:
    """Bytes of a row's arrays."""
    return sum(array.nbytes for array in row.values())


def loss_tokens(row: Mapping[str, NDArray[Any]]) -> int:
    """Tokens of a row that carry loss."""
    mask = row["completion_mask"]
    return int((mask & row["tool_mask"]).sum() if "tool_mask" in row else mask.sum())
