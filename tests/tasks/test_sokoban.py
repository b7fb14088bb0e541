"""Sokoban moves as its rules say, and every level that is made can be solved."""

from collections import deque

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise.errors import ConfigError
from rollwise.tasks.sokoban import HARD, SIMPLE, Sokoban, make_level, read_board

MOVES = ("up", "down", "left", "right")


def pushed(grid, move):
    """A slow reference: the grid of signs, rewritten as a person would; returns the new grid."""
    grid = [list(line) for line in grid]
    down, right = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}[move]
    ((row, column),) = [(r, c) for r, line in enumerate(grid) for c, cell in enumerate(line) if cell in "@+"]
    ahead, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
    at = grid[ahead[0]][ahead[1]]
    if at == "#":
        return grid
    if at in "$*":
        next_cell = grid[beyond[0]][beyond[1]]
        if next_cell not in "_.":
            return grid
        grid[beyond[0]][beyond[1]] = "*" if next_cell == "." else "$"
        at = "." if at == "*" else "_"
    grid[ahead[0]][ahead[1]] = "+" if at == "." else "@"
    grid[row][column] = "." if grid[row][column] == "+" else "_"
    return grid


def count(grid, sign):
    return sum(line.count(sign) for line in grid)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([SIMPLE, HARD, "7x9-3"]), st.lists(st.sampled_from(MOVES), max_size=40)
)
def test_moves_and_rewards_are_the_reference_s(seed, level, moves):
    sokoban = Sokoban(max_turns=100)
    spec = sokoban.draw_spec(level, np.random.default_rng(seed))
    grid = [list(line) for line in spec["board"].split("/")]
    assert sokoban.begin(spec, 0).text == spec["board"].replace("/", "\n")
    for move in moves:
        before = grid
        grid = pushed(grid, move)
        turn = sokoban.take_turn(move)
        assert turn.observation.text == "\n".join(map("".join, grid))
        solved = count(grid, "$") == 0
        reward = -0.1 + count(grid, "*") - count(before, "*") + 10 * solved
        assert turn.reward == pytest.approx(reward)
        assert (turn.terminated, turn.is_success) == (solved, solved)
        if solved:
            break


def solution(board):
    """Breadth first over all positions; the moves, or None."""
    seen = {(board.player, board.boxes)}
    waiting = deque([(board, ())])
    while waiting:
        position, moves = waiting.popleft()
        if position.is_solved:
            return moves
        for move in MOVES:
            after = position.moved(move)
            if (after.player, after.boxes) not in seen:
                seen.add((after.player, after.boxes))
                waiting.append((after, (*moves, move)))
    return None


@pytest.mark.parametrize(("level", "num_levels", "least"), [(SIMPLE, 60, 1), (HARD, 4, 2)])
def test_levels_can_be_solved_by_the_moves_that_a_solver_finds(level, num_levels, least):
    sokoban = Sokoban(max_turns=500)
    rng = np.random.default_rng(7)
    boards = set()
    for _ in range(num_levels):
        spec = sokoban.draw_spec(level, rng)
        board = read_board(spec["board"])
        assert not board.boxes & board.targets
        moves = solution(board)
        assert len(moves) >= least
        sokoban.begin(spec, 0)
        turns = [sokoban.take_turn(move) for move in moves]
        assert turns[-1].is_success
        assert sum(turn.reward for turn in turns) == pytest.approx(-0.1 * len(moves) + len(board.boxes) + 10)
        boards.add(spec["board"])
        assert sokoban.level_of(spec) == level
    assert len(boards) == num_levels


def test_the_same_seed_makes_the_same_levels():
    def boards(seed):
        rng = np.random.default_rng(seed)
        return [Sokoban().draw_spec(level, rng)["board"] for level in ("simple", "hard", SIMPLE)]

    assert boards(3) == boards(3)
    assert boards(3) != boards(4)


def test_a_push_off_a_target_and_a_blocked_one():
    sokoban = Sokoban(step_reward=-0.5, box_reward=2.0)
    sokoban.begin({"board": "#######/#@*_$.#/#######"}, 0)
    turns = [sokoban.take_turn("right") for _ in range(3)]
    assert [turn.reward for turn in turns] == [-2.5, -0.5, -0.5]
    assert turns[1].observation.text == turns[2].observation.text == "#######\n#_+$$.#\n#######"
    assert not turns[2].done


@pytest.mark.parametrize("picture", [False, True])
def test_it_is_a_gymnasium_environment(picture):
    check_env(Sokoban(picture=picture, render_mode="rgb_array"), skip_render_check=True)


def test_every_kind_of_cell_looks_different():
    sokoban = Sokoban(picture=True)
    rows = ["@$._", "@$_.", "_@$.", "_+$_", "@*$.", "#@$."]
    pictures = [sokoban.begin({"board": f"######/#{row}#/######"}, 0).images[0].tobytes() for row in rows]
    assert len(set(pictures)) == len(rows)


@pytest.mark.parametrize(
    ("board", "reason"),
    [
        ("", "rows of one length"),
        ("####/#@#/####", "rows of one length"),
        ("#####/#@$?#/#####", "signs"),
        ("#####/#@$._/#####", "open edge"),
        ("#####/#_$.#/#####", "0 players"),
        ("######/#@@$.#/######", "2 players"),
        ("#####/#@_.#/#####", "0 boxes"),
        ("######/#@$$.#/######", "1 targets"),
        ("#####/#@*_#/#####", "solved"),
    ],
)
def test_a_wrong_board_is_refused(board, reason):
    with pytest.raises(ConfigError, match=reason):
        Sokoban().begin({"board": board}, 0)


@pytest.mark.parametrize("level", ["", "6x6", "3x6-1", "6x6-0", "6x21-1", "easy"])
def test_a_wrong_level_is_refused(level):
    with pytest.raises(ConfigError, match="'6x6-1'"):
        Sokoban().draw_spec(level, np.random.default_rng(0))


def test_what_has_no_room_is_said_so():
    with pytest.raises(ConfigError, match="larger board"):
        make_level(4, 4, 4, np.random.default_rng(0), 0.2)
