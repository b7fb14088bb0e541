"""Sokoban as an environment for language models, with levels that are made from a seed and can be solved.

Boards are written row by row with `/` between the rows: `#` wall, `_` floor, `.` target, `$` box, `*` box on a target,
`@` player, `+` player on a target. That is the common notation, with `_` for the space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from rollwise.bounds import check_share
from rollwise.errors import ConfigError
from rollwise.tasks.actions import DIRECTIONS, parse_action
from rollwise.tasks.environment import Observation, Outcome, Spec
from rollwise.tasks.grids import STEPS, GridEnvironment

__all__ = ["HARD", "SIMPLE", "Board", "Sokoban", "make_level", "read_board"]

SIMPLE = "6x6-1"
"""FreshPER's simple Sokoban, 6x6 with one box; `simple` is short for it."""

HARD = "8x8-2"
"""FreshPER's hard Sokoban, 8x8 with two boxes; `hard` is short for it."""

_MOVES = ("up", "down", "left", "right")
_STEPS_PER_BOX = 60
_PULL_SHARE = 0.7
_ATTEMPTS = 1_000


@dataclass(frozen=True, slots=True)
class Board:
    """A position.

    Attributes:
        walls: Cells of walls; a cell is its row times `num_columns` plus its column.
        targets: Cells of targets.
        boxes: Cells of boxes.
        player: The player's cell.
        num_rows: Rows, with the walls around.
        num_columns: Columns, with the walls around.
    """

    walls: frozenset[int]
    targets: frozenset[int]
    boxes: frozenset[int]
    player: int
    num_rows: int
    num_columns: int

    @property
    def is_solved(self) -> bool:
        """Whether every box is on a target."""
        return self.boxes == self.targets

    def moved(self, action: str) -> Board:
        """Return the position after a move; what cannot be pushed stays, and so does the player.

        A box is pushed when the cell behind it is neither wall nor box. Boxes cannot be pulled.
        """
        down, right = STEPS[action]
        step = down * self.num_columns + right
        to = self.player + step
        if to in self.walls:
            return self
        boxes = self.boxes
        if to in boxes:
            if to + step in self.walls or to + step in boxes:
                return self
            boxes = boxes - {to} | {to + step}
        return Board(self.walls, self.targets, boxes, to, self.num_rows, self.num_columns)

    def lines(self) -> list[str]:
        """Write the board, row by row."""
        cells = ["_"] * (self.num_rows * self.num_columns)
        for cell in self.walls:
            cells[cell] = "#"
        for cell in self.targets:
            cells[cell] = "."
        for cell in self.boxes:
            cells[cell] = "*" if cell in self.targets else "$"
        cells[self.player] = "+" if self.player in self.targets else "@"
        text = "".join(cells)
        return [text[start : start + self.num_columns] for start in range(0, len(text), self.num_columns)]


@lru_cache(maxsize=4096)
def read_board(board: str) -> Board:
    """Read a board, `/` between its rows.

    Raises:
        ConfigError: It is not one: other signs, rows of different lengths, no wall around, not one player, no box, or
            not as many boxes as targets.
    """
    rows = board.split("/")
    cells, num_columns = "".join(rows), len(rows[0])
    if len({len(row) for row in rows}) != 1 or not re.fullmatch(r"[#_.$*@+]+", cells):
        raise ConfigError(
            f"board {board!r} is not one: write rows of one length with / between them, of the signs #_.$*@+"
        )
    edge = rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)
    if set(edge) != {"#"}:
        raise ConfigError(f"board {board!r} has an open edge: put # all around it")
    places = {kind: frozenset(i for i, cell in enumerate(cells) if cell in kind) for kind in ("#", ".*+", "$*", "@+")}
    walls, targets, boxes, players = places.values()
    if len(players) != 1 or not boxes or len(boxes) != len(targets):
        raise ConfigError(
            f"board {board!r} has {len(players)} players, {len(boxes)} boxes and {len(targets)} targets: it must have "
            "one player, at least one box, and as many targets as boxes"
        )
    return Board(walls, targets, boxes, next(iter(players)), len(rows), num_columns)


def make_level(num_rows: int, num_columns: int, num_boxes: int, rng: np.random.Generator, wall_share: float) -> Board:
    """Make a level that can be solved, by playing backwards from the solved position.

    Walls inside are random; the largest connected room is kept. The boxes begin on their targets, and a random walk
    pulls them away: each pull is a push of the solution in reverse. Of the positions with no box on a target, the one
    with the boxes farthest from where they began is the level, with the player anywhere that can be walked to.

    Args:
        num_rows: Rows, with the walls around.
        num_columns: Columns, with the walls around.
        num_boxes: Boxes, and targets.
        rng: Where chance comes from.
        wall_share: Share of the inner cells that are walls.

    Raises:
        ConfigError: No level was found in many attempts: the board is too small for so many boxes and walls.
    """
    for _ in range(_ATTEMPTS):
        floor = _room(num_rows, num_columns, rng, wall_share)
        if len(floor) < 3 * num_boxes + 1:
            continue
        chosen = rng.permutation(len(floor))[: num_boxes + 1]
        homes, player = [floor[i] for i in chosen[:-1]], floor[chosen[-1]]
        found = _pulled_apart(frozenset(floor), homes, player, num_columns, rng)
        if found is not None:
            boxes, player = found
            walls = frozenset(range(num_rows * num_columns)) - set(floor)
            return Board(walls, frozenset(homes), boxes, player, num_rows, num_columns)
    raise ConfigError(
        f"no {num_rows}x{num_columns} level with {num_boxes} boxes and wall_share {wall_share} in {_ATTEMPTS} "
        "attempts: use a larger board, fewer boxes or fewer walls"
    )


@dataclass(kw_only=True, eq=False)
class Sokoban(GridEnvironment):
    """Push every box onto a target.

    Actions are `up`, `down`, `left` and `right`, in the spellings of `rollwise.tasks.actions.DIRECTIONS`. A level is
    written `<rows>x<columns>-<boxes>`, walls around included: `6x6-1` and `8x8-2`, or `simple` and `hard` for these
    two. The spec is `{"board": "######/#@$.__#/..."}` in the notation of this module; the text is the board, too.

    A turn's reward is the sum of what applies, as in gym-sokoban and FreshPER's Sokoban.

    Args:
        max_turns: Turns of an episode.
        wall_share: Share of inner cells that are walls in levels that are made.
        step_reward: For every move, also one that leads nowhere.
        box_reward: For a box that is pushed onto a target; its negative for one that is pushed off.
        done_reward: For the last box on its target, which ends the episode.
    """

    max_turns: int = 20
    wall_share: float = 0.2
    step_reward: float = -0.1
    box_reward: float = 1.0
    done_reward: float = 10.0
    _board: Board = field(init=False, repr=False)

    name: ClassVar[str] = "sokoban"
    kinds: ClassVar[Mapping[str, str]] = {
        "#": "wall",
        "_": "floor",
        ".": "target",
        "$": "box",
        "*": "box_on_target",
        "@": "walker",
        "+": "walker_on_target",
    }
    levels: ClassVar[tuple[str, ...]] = (SIMPLE, HARD)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "wall_share")

    @property
    def instructions(self) -> str:
        """The rules, and how to answer."""
        shown = (
            "In the picture walls are dark brown, the player is the red disc, boxes are orange and targets are violet."
            if self.picture
            else "# is a wall, _ floor, . a target, $ a box, * a box on a target, @ you, + you on a target."
        )
        return (
            "Push every box onto a target. You push a box by walking against it; boxes cannot be pulled, nor pushed "
            f"into walls or other boxes. {shown} Answer with one move: <action>up</action>, <action>down</action>, "
            "<action>left</action> or <action>right</action>."
        )

    def draw_spec(self, level: str, rng: np.random.Generator) -> dict[str, Any]:
        """Make a level that can be solved; see `make_level`.

        Raises:
            ConfigError: Not such a level, or too small for its boxes.
        """
        match = re.fullmatch(r"([0-9]{1,2})x([0-9]{1,2})-([0-9])", {"simple": SIMPLE, "hard": HARD}.get(level, level))
        if match is None or not (all(4 <= int(side) <= 20 for side in match.groups()[:2]) and match[3] != "0"):
            raise ConfigError(
                f"unknown level {level!r}: write <rows>x<columns>-<boxes> with 4 to 20 rows and columns and 1 to 9 "
                "boxes, for example '6x6-1', or 'simple' or 'hard'"
            )
        made = make_level(int(match[1]), int(match[2]), int(match[3]), rng, self.wall_share)
        return {"board": "/".join(made.lines())}

    def level_of(self, spec: Spec) -> str:
        """Name size and boxes, for example `6x6-1`."""
        board = read_board(str(spec["board"]))
        return f"{board.num_rows}x{board.num_columns}-{len(board.boxes)}"

    def _begin(self, spec: Spec) -> Observation:
        self._board = read_board(str(spec.get("board")))
        if self._board.is_solved:
            raise ConfigError(f"board {spec['board']!r} is solved from the start: put a box off its target")
        return self._shown()

    def _play(self, answer: str) -> Outcome:
        action = parse_action(answer, DIRECTIONS)
        if action is None:
            return self._malformed(_MOVES)
        before, after = self._board, self._board.moved(action)
        self._board = after
        reward = self.step_reward
        reward += self.box_reward * (len(after.boxes & after.targets) - len(before.boxes & before.targets))
        if after.is_solved:
            reward += self.done_reward
        return Outcome(self._shown(), reward, after.is_solved, after.is_solved)

    def _lines(self) -> list[str]:
        return self._board.lines()


def _room(num_rows: int, num_columns: int, rng: np.random.Generator, wall_share: float) -> list[int]:
    """Return the cells of the largest connected room among random walls, in order."""
    is_free = np.zeros((num_rows, num_columns), bool)
    is_free[1:-1, 1:-1] = rng.random((num_rows - 2, num_columns - 2)) >= wall_share
    steps = [down * num_columns + right for down, right in STEPS.values()]
    left = set(np.flatnonzero(is_free).tolist())
    largest: set[int] = set()
    while left:
        room = _connected(min(left), left, steps)
        left -= room
        largest = max(largest, room, key=len)
    return sorted(largest)


def _pulled_apart(
    floor: frozenset[int], homes: list[int], player: int, num_columns: int, rng: np.random.Generator
) -> tuple[frozenset[int], int] | None:
    """Walk and pull at random from the solved position; return boxes and player where the boxes are farthest."""
    places = list(homes)  # place i is where the box of home i is
    targets = frozenset(homes)
    steps = [down * num_columns + right for down, right in STEPS.values()]
    best: tuple[frozenset[int], int] | None = None
    farthest = 0
    for pull_number, choice_number in rng.random((_STEPS_PER_BOX * len(homes), 2)).tolist():
        free = [step for step in steps if player + step in floor and player + step not in places]
        pulls = [step for step in free if player - step in places]
        if not free:
            break
        does_pull = bool(pulls) and pull_number < _PULL_SHARE
        choices = pulls if does_pull else free
        step = choices[int(choice_number * len(choices))]
        if does_pull:
            places[places.index(player - step)] = player
        player += step
        if targets.isdisjoint(places):
            far = sum(
                abs(home // num_columns - place // num_columns) + abs(home % num_columns - place % num_columns)
                for home, place in zip(homes, places, strict=True)
            )
            if far > farthest:
                best, farthest = (frozenset(places), player), far
    if best is None:
        return None
    boxes, player = best
    reachable = sorted(_connected(player, set(floor - boxes), steps))
    return boxes, reachable[int(rng.integers(len(reachable)))]


def _connected(start: int, free: set[int], steps: list[int]) -> set[int]:
    """Return the cells that can be walked to from one of them."""
    found, waiting = {start}, [start]
    while waiting:
        cell = waiting.pop()
        near = {cell + step for step in steps} & free - found
        found |= near
        waiting += near
    return found
