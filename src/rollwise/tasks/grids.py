"""Moves on grids of cells, as Gymnasium's toy text makes them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

__all__ = ["STEPS", "moved", "slip"]

STEPS: Mapping[str, tuple[int, int]] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""What each move adds to the row and to the column."""


def moved(row: int, column: int, action: str, num_rows: int, num_columns: int) -> tuple[int, int]:
    """Return where a move leads; one over the edge leads nowhere."""
    down, right = STEPS[action]
    return min(max(row + down, 0), num_rows - 1), min(max(column + right, 0), num_columns - 1)


def slip(rng: np.random.Generator, aside: float, straight: float) -> int:
    """Draw by how many quarter turns a move goes astray: -1 and 1 with probability `aside` each, 0 with `straight`.

    Draws one number and compares it as Gymnasium's `categorical_sample` does.
    """
    number = rng.random()
    if number < aside or number >= aside + straight + aside:  # rounding may leave that sum below 1
        return -1
    return 0 if number < aside + straight else 1
