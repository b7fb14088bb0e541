"""Images, video and audio of verl's rows as flat arrays: what the model takes beside the tokens.

media.<name>         an entry of the row's `multi_modal_inputs`, such as pixel_values: all rows', flat
media_shape.<name>   per row the number of dimensions, -1 where it has no such entry, and then the dimensions
position_ids         where the model gives a token several positions: per row shape (positions, tokens), flat
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollwise.errors import InexactSettingError

_VALUES, _SHAPES, _POSITIONS = "media.", "media_shape.", "position_ids"


def media_to_arrays(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """The arrays of one rollout's rows; none where they are of text alone.

    Args:
        rows: With the fields `multi_modal_inputs` and `position_ids`.

    Raises:
        InexactSettingError: If an entry is no tensor of a type that numpy has.
    """
    inputs = [row.get("multi_modal_inputs") or {} for row in rows]
    arrays: dict[str, NDArray[Any]] = {}
    for name in dict.fromkeys(name for entries in inputs for name in entries):
        tensors = [_as_array(name, entries[name]) if name in entries else None for entries in inputs]
        present = [tensor for tensor in tensors if tensor is not None]
        arrays[_VALUES + name] = np.concatenate([tensor.ravel() for tensor in present])
        shapes = [(-1,) if tensor is None else (tensor.ndim, *tensor.shape) for tensor in tensors]
        arrays[_SHAPES + name] = np.array([size for shape in shapes for size in shape], dtype=np.int64)
    positions = [row[_POSITIONS] for row in rows if row.get(_POSITIONS) is not None]
    if any(each.ndim > 1 for each in positions):
        arrays[_POSITIONS] = np.concatenate([each.cpu().numpy().astype(np.int32).ravel() for each in positions])
    return arrays


def _as_array(name: str, value: Any) -> NDArray[Any]:
    try:
        array: NDArray[Any] = value.detach().cpu().numpy()
    except (AttributeError, TypeError) as error:
        kind = getattr(value, "dtype", type(value).__name__)
        raise InexactSettingError(
            f"multi_modal_inputs[{name!r}] of a rollout is of type {kind}, which cannot be stored; let the processor "
            "return tensors of float32 or of integers, or turn replay and allocation off"
        ) from error
    return array


def media_of_rows(arrays: Mapping[str, NDArray[Any]], num_tokens: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """Per row, its `multi_modal_inputs` again.

    Args:
        arrays: Of one rollout.
        num_tokens: Of each row.
    """
    rows: list[dict[str, torch.Tensor]] = [{} for _ in num_tokens]
    for key in arrays:
        if not key.startswith(_VALUES):
            continue
        name = key.removeprefix(_VALUES)
        values, shapes = arrays[key], arrays[_SHAPES + name].tolist()
        start = at = 0
        for row in rows:
            ndim = shapes[at]
            shape = shapes[at + 1 : at + 1 + max(ndim, 0)]
            at += 1 + len(shape)
            if ndim >= 0:
                size = int(np.prod(shape))
                row[name] = torch.from_numpy(values[start : start + size].reshape(shape))
                start += size
    return rows


def positions_of_rows(arrays: Mapping[str, NDArray[Any]], num_tokens: Sequence[int]) -> list[torch.Tensor]:
    """Per row, its `position_ids` again: one after the other, or those that the model has given."""
    if _POSITIONS not in arrays:
        return [torch.arange(tokens) for tokens in num_tokens]
    positions = arrays[_POSITIONS]
    per_token = len(positions) // sum(num_tokens)
    pieces = np.split(positions, np.cumsum(num_tokens)[:-1] * per_token)
    shaped = (piece.reshape(per_token, -1) for piece in pieces)
    return [torch.from_numpy(piece).long() for piece in shaped]


def media_nbytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Bytes of these arrays among a rollout's."""
    return sum(a.nbytes for name, a in arrays.items() if name.startswith((_VALUES, _SHAPES)) or name == _POSITIONS)
