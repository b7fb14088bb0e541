"""Who knows the way: the best action in the present state of an environment, for demonstrations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rollwise.errors import ConfigError
from rollwise.tasks.environment import LanguageEnvironment
from rollwise.tasks.frozen_lake import FrozenLake
from rollwise.tasks.grids import STEPS, moved
from rollwise.tasks.search import SearchQA
from rollwise.tasks.sokoban import Board, Sokoban

__all__ = ["EXPERTS", "best_action"]

_MOST_BOARDS = 20_000  # positions that a search looks at; a simple level has a few hundred


def best_action(environment: LanguageEnvironment, rng: np.random.Generator) -> str:
    """Return an action that is best in the present state; of equally good ones one at random.

    Raises:
        ConfigError: Nobody knows this environment.
    """
    expert = EXPERTS.get(type(environment))
    if expert is None:
        known = ", ".join(kind.__name__ for kind in EXPERTS)
        raise ConfigError(f"there is no expert for {type(environment).__name__}; there are some for {known}")
    choices = expert(environment)
    return choices[int(rng.integers(len(choices)))]


def _lake_actions(lake: Any) -> list[str]:
    """Moves along a shortest path to the goal that keeps out of holes, as if the ice were not slippery."""
    distances = _lake_distances(lake._lake.rows)
    rows = lake._lake.rows
    ways = [distances.get(moved(lake._row, lake._column, move, len(rows), len(rows[0])), 1 << 30) for move in STEPS]
    return [move for move, way in zip(STEPS, ways, strict=True) if way == min(ways)]


@lru_cache(maxsize=4096)
def _lake_distances(rows: tuple[str, ...]) -> dict[tuple[int, int], int]:
    """Steps from each cell to the nearest goal, by breadth-first search; cells without a way are left out."""
    cells = {(r, c): cell for r, line in enumerate(rows) for c, cell in enumerate(line)}
    distances = {place: 0 for place, cell in cells.items() if cell == "G"}
    queue = deque(distances)
    while queue:
        row, column = queue.popleft()
        for down, right in STEPS.values():
            near = (row + down, column + right)
            if cells.get(near) in ("S", "F") and near not in distances:
                distances[near] = distances[row, column] + 1
                queue.append(near)
    return distances


@lru_cache(maxsize=100_000)
def _board_actions(board: Board) -> tuple[str, ...]:
    """First moves of the shortest solutions; of every move that changes something where there is no solution."""
    level: dict[Board, set[str]] = {}
    for move in STEPS:
        after = board.moved(move)
        if after != board:
            level.setdefault(after, set()).add(move)
    seen = {board}
    while level:
        solved = {move for after, moves in level.items() if after.is_solved for move in moves}
        if solved:
            return tuple(move for move in STEPS if move in solved)
        seen |= level.keys()
        if len(seen) > _MOST_BOARDS:
            break
        following: dict[Board, set[str]] = {}
        for before, moves in level.items():
            for move in STEPS:
                after = before.moved(move)
                if after not in seen:
                    following.setdefault(after, set()).update(moves)
        level = following
    return tuple(move for move in STEPS if board.moved(move) != board) or tuple(STEPS)


def _answers_after_search(asked: Any) -> list[str]:
    """Search for the person whom a question of `rollwise.tasks.fictions` names; then give the right answer."""
    if asked._turns:
        return [f"<answer>{answer}</answer>" for answer in asked._answers]
    words = [word.rstrip("?") for word in asked._spec["question"].split()]
    return [f"<search>{words[2]} {words[3]}</search>"]


EXPERTS: dict[type[LanguageEnvironment], Callable[[Any], Sequence[str]]] = {
    FrozenLake: _lake_actions,
    SearchQA: _answers_after_search,
    Sokoban: lambda sokoban: _board_actions(sokoban._board),
}
"""For each kind of environment a function from it to its best actions, at least one."""
