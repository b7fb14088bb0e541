"""Who knows the way: the best action in the present state of an environment, for demonstrations."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rollwise.errors import ConfigError
from rollwise.tasks.countdown import Countdown, evaluate_expression
from rollwise.tasks.environment import LanguageEnvironment
from rollwise.tasks.frozen_lake import FrozenLake
from rollwise.tasks.grids import STEPS, moved
from rollwise.tasks.search import SearchQA
from rollwise.tasks.sokoban import Board, Sokoban

__all__ = ["EXPERTS", "any_action", "best_action"]

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


def any_action(environment: LanguageEnvironment, rng: np.random.Generator) -> str:
    """Return an action at random, good or bad: a move, or an expression of a countdown's numbers."""
    if not isinstance(environment, Countdown):
        return tuple(STEPS)[int(rng.integers(len(STEPS)))]
    numbers = environment._numbers
    expressions = _expressions(tuple(numbers[i] for i in rng.permutation(len(numbers))))
    return expressions[int(rng.integers(len(expressions)))][0]


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


def _right_expressions(countdown: Any) -> list[str]:
    """Every expression of all numbers that reaches the target."""
    orders = set(itertools.permutations(countdown._numbers))
    texts = {
        text for order in orders for text, value, _ in _expressions(order) if abs(value - countdown._target) < 1e-6
    }
    exact = sorted(text for text in texts if (found := evaluate_expression(text)) and found[0] == countdown._target)
    if not exact:
        raise ConfigError(f"no expression of the numbers {countdown._numbers} comes to {countdown._target}")
    return exact


@lru_cache(maxsize=4096)
def _expressions(numbers: tuple[int, ...]) -> list[tuple[str, float, int]]:
    """All expressions of these numbers in this order: text with as few brackets as it needs, value, how it binds."""
    if len(numbers) == 1:
        return [(str(numbers[0]), float(numbers[0]), 3)]
    found: list[tuple[str, float, int]] = []
    for cut in range(1, len(numbers)):
        for (left, a, left_binds), (right, b, right_binds) in itertools.product(
            _expressions(numbers[:cut]), _expressions(numbers[cut:])
        ):
            values = {"+": a + b, "-": a - b, "*": a * b} | ({"/": a / b} if b else {})
            for sign, value in values.items():
                binds = 1 if sign in "+-" else 2
                first = left if left_binds >= binds else f"({left})"
                # a - (b + c) needs its brackets, a + (b - c) does not.
                is_clear = right_binds > binds or (right_binds == binds and sign in "+*")
                found.append((f"{first}{sign}{right if is_clear else f'({right})'}", value, binds))
    return found


EXPERTS: dict[type[LanguageEnvironment], Callable[[Any], Sequence[str]]] = {
    Countdown: _right_expressions,
    FrozenLake: _lake_actions,
    SearchQA: _answers_after_search,
    Sokoban: lambda sokoban: _board_actions(sokoban._board),
}
"""For each kind of environment a function from it to its best actions, at least one."""
