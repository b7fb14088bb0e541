"""FrozenLake of Gymnasium's toy text, as an environment for language models.

The dynamics are Gymnasium's, draw for draw: an episode with the same map, seed and moves takes the same course there.
They are written out here because Gymnasium's table of transitions takes longer to make than an episode to play. Maps
are written row by row with `/` between the rows: `S` start, `F` frozen, `H` hole, `G` goal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from gymnasium.envs.toy_text.utils import categorical_sample

from rollwise.bounds import check_share
from rollwise.errors import ConfigError
from rollwise.tasks.actions import numbered, parse_action
from rollwise.tasks.environment import Observation, Outcome, Spec
from rollwise.tasks.grids import GridEnvironment, moved, slip

__all__ = ["FrozenLake"]

_MOVES = ("left", "down", "right", "up")
_KNOWN = numbered(_MOVES)


@dataclass(kw_only=True, eq=False)
class FrozenLake(GridEnvironment):
    """Walk from the start to the goal without falling into a hole.

    Actions are `left`, `down`, `right` and `up`, in the spellings of `rollwise.tasks.actions.DIRECTIONS`, or
    Gymnasium's numbers 0 to 3 in this order. A level is
    written `<rows>x<columns>`, for example `4x4`, and means random maps of that size with a path to the goal. The spec
    is `{"map": "SFFF/FHFH/FFFH/HFFG"}`, with any map.

    The text is the map with `P` for the player, `X` for one in a hole and `W` for one at the goal, and `F` where the
    start was.

    Args:
        slippery: Whether a move may go to either side of its direction, as in Gymnasium.
        success_rate: On slippery ice, how often a move goes where it should; Gymnasium's 1/3.
        frozen_share: Share of frozen cells in random maps; Gymnasium's 0.8.
        goal_reward: Reward of reaching the goal; Gymnasium's 1.
        hole_reward: Reward of falling into a hole; Gymnasium's 0.
        step_reward: Reward of every other move; Gymnasium's 0.
    """

    slippery: bool = False
    success_rate: float = 1 / 3
    frozen_share: float = 0.8
    goal_reward: float = 1.0
    hole_reward: float = 0.0
    step_reward: float = 0.0
    _lake: _Lake = field(init=False, repr=False)
    _row: int = field(init=False, default=0, repr=False)
    _column: int = field(init=False, default=0, repr=False)

    name: ClassVar[str] = "frozen_lake"
    kinds: ClassVar[Mapping[str, str]] = {
        "F": "ice",
        "H": "hole",
        "G": "goal",
        "P": "player",
        "X": "drowned",
        "W": "arrived",
    }
    levels: ClassVar[tuple[str, ...]] = ("3x3", "4x4", "5x5", "6x6", "8x8")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "success_rate", "frozen_share")
        if not self.frozen_share > 0:
            raise ConfigError("frozen_share is 0; it must be above 0, for there would be no path to the goal")

    @property
    def instructions(self) -> str:
        """The rules, and how to answer."""
        shown = (
            "In the picture the player is the red disc, holes are dark blue discs and the goal is the green square."
            if self.picture
            else "P is the player, F is ice, H is a hole and G is the goal."
        )
        slips = " The ice is slippery: a move may go to either side of its direction." if self.slippery else ""
        return (
            f"Cross the frozen lake to the goal without falling into a hole. {shown}{slips} "
            "Answer with one move: <action>left</action>, <action>down</action>, <action>right</action> or "
            "<action>up</action>."
        )

    def draw_spec(self, level: str, rng: np.random.Generator) -> dict[str, Any]:
        """Draw a random map with a path to the goal, by Gymnasium's `generate_random_map`.

        Raises:
            ConfigError: Not a square size between 2x2 and 16x16.
        """
        match = re.fullmatch(r"([0-9]{1,2})x([0-9]{1,2})", level)
        if match is None or match[1] != match[2] or not 2 <= int(match[1]) <= 16:
            raise ConfigError(f"unknown level {level!r}: write a square size from '2x2' to '16x16', for example '4x4'")
        seed = int(rng.integers(2**31))
        return {"map": "/".join(generate_random_map(size=int(match[1]), p=self.frozen_share, seed=seed))}

    def level_of(self, spec: Spec) -> str:
        """Name the size of the map, for example `4x4`."""
        rows = str(spec["map"]).split("/")
        return f"{len(rows)}x{len(rows[0])}"

    def _begin(self, spec: Spec) -> Observation:
        self._lake = _lake(str(spec.get("map")))
        start = int(categorical_sample(self._lake.start_shares, self.np_random))
        self._row, self._column = divmod(start, len(self._lake.rows[0]))
        return self._shown()

    def _play(self, answer: str) -> Outcome:
        action = parse_action(answer, _KNOWN)
        if action is None:
            return self._malformed(_MOVES)
        if self.slippery:
            aside = (1 - self.success_rate) / 2
            action = _MOVES[(_MOVES.index(action) + slip(self.np_random, aside, self.success_rate)) % 4]
        rows = self._lake.rows
        self._row, self._column = moved(self._row, self._column, action, len(rows), len(rows[0]))
        cell = rows[self._row][self._column]
        reward = {"G": self.goal_reward, "H": self.hole_reward}.get(cell, self.step_reward)
        return Outcome(self._shown(), reward, cell in "GH", cell == "G")

    def _lines(self) -> list[str]:
        lines, row, column = list(self._lake.lines), self._row, self._column
        shown = {"H": "X", "G": "W"}.get(lines[row][column], "P")
        lines[row] = lines[row][:column] + shown + lines[row][column + 1 :]
        return lines


@dataclass(frozen=True, slots=True)
class _Lake:
    """A map: its rows, the same as they are shown, and how likely each cell is the start, row by row."""

    rows: tuple[str, ...]
    lines: tuple[str, ...]
    start_shares: np.ndarray


@lru_cache(maxsize=4096)
def _lake(lake_map: str) -> _Lake:
    rows = tuple(lake_map.split("/"))
    if len({len(row) for row in rows}) != 1 or not re.fullmatch(r"[SFHG/]+", lake_map) or "S" not in lake_map:
        raise ConfigError(
            f"map {lake_map!r} is not one: write rows of one length with / between them, of S (start, at least one), "
            "F (frozen), H (hole) and G (goal), for example 'SFFF/FHFH/FFFH/HFFG'"
        )
    starts = np.array([cell == "S" for row in rows for cell in row], float)
    return _Lake(rows, tuple(row.replace("S", "F") for row in rows), starts / starts.sum())
