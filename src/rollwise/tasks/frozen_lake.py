"""FrozenLake of Gymnasium's toy text, as an environment for language models.

The dynamics are Gymnasium's own transition table, so an episode with the same seed takes the same course there. Maps
are written row by row with `/` between the rows: `S` start, `F` frozen, `H` hole, `G` goal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from gymnasium.envs.toy_text.utils import categorical_sample

from rollwise.bounds import check_share
from rollwise.errors import ConfigError
from rollwise.tasks.actions import DIRECTIONS, parse_action
from rollwise.tasks.environment import LanguageEnvironment, Observation, Outcome, Spec
from rollwise.tasks.pictures import draw_grid, paste

__all__ = ["FrozenLake"]

_NUMBER = {"left": 0, "down": 1, "right": 2, "up": 3}
_KINDS = {"S": "start", "F": "ice", "H": "hole", "G": "goal"}


@dataclass(kw_only=True, eq=False)
class FrozenLake(LanguageEnvironment):
    """Walk from the start to the goal without falling into a hole.

    Actions are `left`, `down`, `right` and `up`, in the spellings of `rollwise.tasks.actions.DIRECTIONS`. A level is
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
    _map: str = field(init=False, default="", repr=False)
    _transitions: dict[int, dict[int, list[tuple[float, int, float, bool]]]] = field(
        init=False, default_factory=dict, repr=False
    )
    _num_columns: int = field(init=False, default=0, repr=False)
    _state: int = field(init=False, default=0, repr=False)

    name: ClassVar[str] = "frozen_lake"
    has_pictures: ClassVar[bool] = True
    may_hang: ClassVar[bool] = False
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
        schedule = (self.goal_reward, self.hole_reward, self.step_reward)
        self._map = str(spec.get("map"))
        self._transitions, starts, self._num_columns = _lake(self._map, self.slippery, self.success_rate, schedule)
        self._state = int(categorical_sample(starts, self.np_random))
        return self._observe(self._text())

    def _play(self, answer: str) -> Outcome:
        action = parse_action(answer, DIRECTIONS)
        if action is None:
            return self._malformed(tuple(_NUMBER))
        moves = self._transitions[self._state][_NUMBER[action]]
        chosen = 0 if len(moves) == 1 else int(categorical_sample([move[0] for move in moves], self.np_random))
        _, self._state, reward, done = moves[chosen]
        return Outcome(self._observe(self._text()), reward, done, done and self._cell() == "G")

    def _cell(self) -> str:
        row, column = divmod(self._state, self._num_columns)
        return self._map[row * (self._num_columns + 1) + column]

    def _text(self) -> str:
        row, column = divmod(self._state, self._num_columns)
        at = row * (self._num_columns + 1) + column
        shown = {"H": "X", "G": "W"}.get(self._map[at], "P")
        return (self._map[:at] + shown + self._map[at + 1 :]).replace("S", "F").replace("/", "\n")

    def _picture(self) -> np.ndarray:
        picture = _background(self._map).copy()
        row, column = divmod(self._state, self._num_columns)
        kind = {"H": "drowned", "G": "arrived"}.get(self._cell(), "player")
        paste(picture, kind, row, column, self._map.count("/") + 1, self._num_columns)
        return picture


@lru_cache(maxsize=4096)
def _lake(lake_map: str, slippery: bool, success_rate: float, schedule: tuple[float, float, float]) -> Any:
    """Return Gymnasium's transitions and starting distribution of a map, and its number of columns."""
    rows = lake_map.split("/")
    sides = len({len(row) for row in rows})
    if sides != 1 or not re.fullmatch(r"[SFHG/]+", lake_map) or "S" not in lake_map:
        raise ConfigError(
            f"map {lake_map!r} is not one: write rows of one length with / between them, of S (start, at least one), "
            "F (frozen), H (hole) and G (goal), for example 'SFFF/FHFH/FFFH/HFFG'"
        )
    lake = FrozenLakeEnv(desc=rows, is_slippery=slippery, success_rate=success_rate, reward_schedule=schedule)  # type: ignore[arg-type]
    return lake.P, lake.initial_state_distrib, lake.ncol


@lru_cache(maxsize=4096)
def _background(lake_map: str) -> np.ndarray:
    return draw_grid([[_KINDS[cell] for cell in row] for row in lake_map.split("/")])
