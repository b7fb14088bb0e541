"""Grids as pictures."""

import numpy as np
import pytest

from rollwise.errors import ConfigError
from rollwise.tasks.pictures import TILES, draw_grid


@pytest.mark.parametrize("side", [5, 8, 16])
def test_every_kind_has_a_tile_of_its_own(side):
    """From 5 pixels on, at which a 4x12 board is drawn."""
    count = 64 // side
    tiles = {kind: draw_grid(["x" * count] * count, {"x": kind})[:side, :side].tobytes() for kind in TILES}
    assert len(set(tiles.values())) == len(TILES)


def test_cells_are_where_they_should_be():
    kinds = {"w": "wall", "f": "floor"}
    picture = draw_grid(["wf", "ff", "ff", "fw"], kinds)  # 4 rows of 16 pixels, 2 columns in the middle
    assert picture.shape == (64, 64, 3)
    assert picture.dtype == np.uint8
    wall, floor = TILES["wall"][0], TILES["floor"][0]
    assert tuple(picture[5, 5]) == tuple(picture[60, 60]) == (255, 255, 255)
    assert tuple(picture[5, 20]) == tuple(picture[55, 40]) == wall
    assert tuple(picture[5, 40]) == tuple(picture[55, 20]) == floor


def test_what_is_too_large_is_refused():
    with pytest.raises(ConfigError, match="65 x 1 does not fit"):
        draw_grid(["f"] * 65, {"f": "floor"})
