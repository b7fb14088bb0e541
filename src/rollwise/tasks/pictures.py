"""64x64 pictures of grids: a tile of flat colours and plain shapes for each kind of cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from rollwise.errors import ConfigError
from rollwise.tasks.environment import PICTURE_PIXELS

__all__ = ["TILES", "draw_grid"]

Colour = tuple[int, int, int]

TILES: Mapping[str, tuple[Colour, Colour | None, str]] = {
    "ice": ((214, 234, 248), None, ""),
    "hole": ((214, 234, 248), (20, 40, 90), "disc"),
    "goal": ((214, 234, 248), (30, 160, 60), "square"),
    "player": ((214, 234, 248), (220, 40, 40), "disc"),
    "drowned": ((20, 40, 90), (220, 40, 40), "disc"),
    "arrived": ((30, 160, 60), (220, 40, 40), "disc"),
    "floor": ((225, 215, 195), None, ""),
    "wall": ((90, 70, 60), None, ""),
    "box": ((225, 215, 195), (200, 130, 40), "square"),
    "target": ((225, 215, 195), (170, 60, 160), "ring"),
    "box_on_target": ((170, 60, 160), (200, 130, 40), "square"),
    "walker": ((225, 215, 195), (220, 40, 40), "disc"),
    "walker_on_target": ((170, 60, 160), (220, 40, 40), "disc"),
    "cliff": ((60, 40, 40), (110, 80, 60), "ring"),
}
"""Each kind of cell: ground, colour of the shape, shape (`disc`, `square`, `ring` or none)."""


def draw_grid(lines: Sequence[str], kinds: Mapping[str, str]) -> np.ndarray:
    """Draw a grid in the middle of a white picture.

    Args:
        lines: The rows of the grid, all of one length, each sign a cell. ASCII.
        kinds: Name in `TILES` of each sign.

    Returns:
        uint8 of shape (64, 64, 3).

    Raises:
        ConfigError: The grid has more than 64 rows or columns.
    """
    num_rows, num_columns = len(lines), len(lines[0])
    side = PICTURE_PIXELS // max(num_rows, num_columns)
    if side < 1:
        raise ConfigError(
            f"a grid of {num_rows} x {num_columns} does not fit into {PICTURE_PIXELS} x {PICTURE_PIXELS} pixels: "
            "make it smaller, or use the text version"
        )
    cells = np.frombuffer("".join(lines).encode("ascii"), np.uint8).reshape(num_rows, num_columns)
    tiles = _tiles(tuple(kinds.items()), side)[cells]
    drawn = tiles.transpose(0, 2, 1, 3, 4).reshape(num_rows * side, num_columns * side, 3)
    if drawn.shape[:2] == (PICTURE_PIXELS, PICTURE_PIXELS):
        return drawn
    picture = np.full((PICTURE_PIXELS, PICTURE_PIXELS, 3), 255, np.uint8)
    top, left = ((PICTURE_PIXELS - length) // 2 for length in drawn.shape[:2])
    picture[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn
    return picture


@lru_cache(maxsize=256)
def _tiles(kinds: tuple[tuple[str, str], ...], side: int) -> np.ndarray:
    """Draw the tile of each sign; uint8 of shape (128, side, side, 3), by the signs' ASCII codes."""
    tiles = np.zeros((128, side, side, 3), np.uint8)
    for sign, kind in kinds:
        tiles[ord(sign)] = _tile(kind, side)
    return tiles


def _tile(kind: str, side: int) -> np.ndarray:
    """Draw one tile; a line at its right and lower edge parts it from its neighbours."""
    ground, colour, shape = TILES[kind]
    tile = np.empty((side, side, 3), np.uint8)
    tile[:] = ground
    if colour is not None:
        centre = (side - 1) / 2
        rows, columns = np.abs(np.arange(side) - centre)[:, None], np.abs(np.arange(side) - centre)[None, :]
        distance = np.maximum(rows, columns) if shape == "square" else np.hypot(rows, columns)
        inside = distance <= 0.36 * side
        if shape == "ring":
            inside &= distance > 0.18 * side
        tile[inside] = colour
    if side >= 6:
        tile[-1, :], tile[:, -1] = 160, 160
    return tile
