"""Environments on grids of cells, and moves there as Gymnasium's toy text makes them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rollwise.tasks.environment import LanguageEnvironment, Observation
from rollwise.tasks.pictures import draw_grid

__all__ = ["STEPS", "GridEnvironment", "moved", "slip"]

STEPS: Mapping[str, tuple[int, int]] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""What each move adds to the row and to the column."""


@dataclass(kw_only=True, eq=False)
class GridEnvironment(LanguageEnvironment):
    """Base of environments whose state is a grid of signs: the text has a line per row, the picture a tile per sign."""

    has_pictures: ClassVar[bool] = True
    may_hang: ClassVar[bool] = False
    kinds: ClassVar[Mapping[str, str]]
    """For each sign the name of its tile in `rollwise.tasks.pictures.TILES`."""

    @abstractmethod
    def _lines(self) -> Sequence[str]:
        """Write the present state, row by row."""
        raise NotImplementedError

    def _shown(self) -> Observation:
        """Observe the present state."""
        return self._observe("\n".join(self._lines()))

    def _picture(self) -> np.ndarray:
        return draw_grid(self._lines(), self.kinds)


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
