"""CliffWalking of Gymnasium's toy text (Sutton and Barto, example 6.6), as an environment for language models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rollwise.errors import ConfigError
from rollwise.tasks.actions import numbered, parse_action
from rollwise.tasks.environment import Observation, Outcome, Spec
from rollwise.tasks.grids import GridEnvironment, moved, slip

__all__ = ["STANDARD", "CliffWalking"]

STANDARD: dict[str, Any] = {"rows": 4, "columns": 12, "start": [3, 0]}
"""The spec of Gymnasium's board."""

_MOVES = ("up", "right", "down", "left")
_KNOWN = numbered(_MOVES)


@dataclass(kw_only=True, eq=False)
class CliffWalking(GridEnvironment):
    """Walk along a cliff to the goal in few steps; who steps over the edge is back at the lower left corner.

    The goal is the lower right corner, the cliff all between the two. Actions are `up`, `right`, `down` and `left`, in
    the spellings of `rollwise.tasks.actions.DIRECTIONS`, or Gymnasium's numbers 0 to 3 in this order. A level is
    written `<rows>x<columns>` and means a random start on a board of that size. The spec is
    `{"rows": 4, "columns": 12, "start": [3, 0]}`, which is `STANDARD`, the board of Gymnasium.

    The text shows `P` player, `C` cliff, `G` goal, `_` floor, `W` the player at the goal.

    Args:
        max_turns: Turns of an episode; the shortest way on the standard board takes 13.
        slippery: Whether a move goes to either side of its direction in two of three cases, as in Gymnasium.
        step_reward: Reward of a move; Gymnasium's -1.
        cliff_reward: Reward of a move over the edge; Gymnasium's -100.
        goal_reward: Reward of the move to the goal; Gymnasium's -1.
    """

    max_turns: int = 30
    slippery: bool = False
    step_reward: float = -1.0
    cliff_reward: float = -100.0
    goal_reward: float = -1.0
    _num_rows: int = field(init=False, default=0, repr=False)
    _num_columns: int = field(init=False, default=0, repr=False)
    _row: int = field(init=False, default=0, repr=False)
    _column: int = field(init=False, default=0, repr=False)

    name: ClassVar[str] = "cliff_walking"
    kinds: ClassVar[Mapping[str, str]] = {
        "P": "walker",
        "W": "walker_on_target",
        "C": "cliff",
        "G": "target",
        "_": "floor",
    }
    levels: ClassVar[tuple[str, ...]] = ("3x4", "4x6", "4x8", "4x12")

    @property
    def instructions(self) -> str:
        """The rules, and how to answer."""
        shown = (
            "In the picture the player is the red disc, the cliff is dark and the goal is the ring."
            if self.picture
            else "P is the player, C is the cliff, G is the goal and _ is floor."
        )
        slips = " The floor is slippery: a move may go to either side of its direction." if self.slippery else ""
        return (
            "Walk to the goal in as few steps as you can. Stepping onto the cliff costs much and takes you back to the "
            f"lower left corner. {shown}{slips} Answer with one move: <action>up</action>, <action>right</action>, "
            "<action>down</action> or <action>left</action>."
        )

    def draw_spec(self, level: str, rng: np.random.Generator) -> dict[str, Any]:
        """Draw a start, which is neither on the cliff nor the goal.

        Raises:
            ConfigError: Not a size of 2x3 to 32x32.
        """
        match = re.fullmatch(r"([0-9]{1,2})x([0-9]{1,2})", level)
        if match is None or not (2 <= int(match[1]) <= 32 and 3 <= int(match[2]) <= 32):
            raise ConfigError(f"unknown level {level!r}: write a size from '2x3' to '32x32', for example '4x12'")
        rows, columns = int(match[1]), int(match[2])
        place = int(rng.integers((rows - 1) * columns + 1))  # the row of the cliff has one such place, its left end
        return {"rows": rows, "columns": columns, "start": list(divmod(place, columns))}

    def level_of(self, spec: Spec) -> str:
        """Name the size of the board, for example `4x12`."""
        return f"{spec['rows']}x{spec['columns']}"

    def _begin(self, spec: Spec) -> Observation:
        try:
            rows, columns, (row, column) = int(spec["rows"]), int(spec["columns"]), map(int, spec["start"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"spec {dict(spec)!r} is not one of cliff_walking; a whole one is {STANDARD}") from None
        if not (2 <= rows <= 32 and 3 <= columns <= 32 and 0 <= row < rows and 0 <= column < columns):
            raise ConfigError(f"spec {dict(spec)!r}: boards are 2x3 to 32x32, and the start must be on the board")
        if row == rows - 1 and column > 0:
            raise ConfigError(
                f"start {[row, column]} is on the cliff or the goal; of the last row only column 0 is free"
            )
        self._num_rows, self._num_columns, self._row, self._column = rows, columns, row, column
        self.np_random.random()  # Gymnasium draws the start, though there is but one
        return self._shown()

    def _play(self, answer: str) -> Outcome:
        action = parse_action(answer, _KNOWN)
        if action is None:
            return self._malformed(_MOVES)
        if self.slippery:
            action = _MOVES[(_MOVES.index(action) + slip(self.np_random, 1 / 3, 1 / 3)) % 4]
        self._row, self._column = moved(self._row, self._column, action, self._num_rows, self._num_columns)
        reward, done = self.step_reward, False
        if self._row == self._num_rows - 1 and self._column > 0:
            done = self._column == self._num_columns - 1
            reward = self.goal_reward if done else self.cliff_reward
            self._column = self._column if done else 0
        return Outcome(self._shown(), reward, done, done)

    def _lines(self) -> list[str]:
        lines = ["_" * self._num_columns] * (self._num_rows - 1) + ["_" + "C" * (self._num_columns - 2) + "G"]
        line = lines[self._row]
        shown = "W" if line[self._column] == "G" else "P"
        lines[self._row] = line[: self._column] + shown + line[self._column + 1 :]
        return lines
