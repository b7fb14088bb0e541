"""FrozenLake takes Gymnasium's course, and shows what it should."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rollwise.errors import ConfigError
from rollwise.tasks.frozen_lake import FrozenLake

MOVES = ("left", "down", "right", "up")
FOUR = "SFFF/FHFH/FFFH/HFFG"


@pytest.mark.parametrize("slippery", [False, True])
@pytest.mark.parametrize("lake_map", [FOUR, "SFH/FSF/GFG"])
def test_the_course_is_gymnasiums_with_the_same_seed(slippery, lake_map):
    rng = np.random.default_rng(0)
    ends = set()
    for seed in range(400):
        theirs = gymnasium.make("FrozenLake-v1", desc=lake_map.split("/"), is_slippery=slippery).unwrapped
        ours = FrozenLake(slippery=slippery, max_turns=1000)
        state, _ = theirs.reset(seed=seed)
        text = ours.begin({"map": lake_map}, seed).text
        done = False
        while not done:
            columns = lake_map.index("/")
            row, column = divmod(state, columns)
            assert text.split("\n")[row][column] in "PXW"
            assert sum(text.count(player) for player in "PXW") == 1
            move = int(rng.integers(4))
            state, reward, done, _, _ = theirs.step(move)
            turn = ours.take_turn(f"<action>{MOVES[move]}</action>")
            text = turn.observation.text
            assert (turn.reward, turn.terminated, turn.truncated) == (reward, done, False)
            assert turn.is_success == (done and reward == 1)
        ends.add(turn.is_success)
    assert ends == {True, False}


def test_rewards_are_settings():
    lake = FrozenLake(goal_reward=5.0, hole_reward=-2.0, step_reward=-0.5)
    lake.begin({"map": "SFG/FHF"}, 0)
    assert [lake.take_turn(move).reward for move in ("right", "right")] == [-0.5, 5.0]
    lake.begin({"map": "SFG/FHF"}, 0)
    turns = [lake.take_turn(move) for move in ("r", "d")]
    assert turns[1].reward == -2.0
    assert turns[1].observation.text == "FFG\nFXF"
    assert not turns[1].is_success


def test_success_rate_one_never_slips():
    lake = FrozenLake(slippery=True, success_rate=1.0)
    for seed in range(20):
        lake.begin({"map": "SFFG/HHHH"}, seed)
        assert [lake.take_turn("right").reward for _ in range(3)] == [0, 0, 1]


@pytest.mark.parametrize("picture", [False, True])
def test_it_is_a_gymnasium_environment(picture):
    check_env(FrozenLake(picture=picture, render_mode="rgb_array"), skip_render_check=True)


def test_pictures_differ_where_the_text_does():
    """Every state of a map has its own picture, and the player's place is what differs."""
    lake = FrozenLake(picture=True)
    seen = {}
    rng = np.random.default_rng(1)
    for seed in range(40):
        observation = lake.begin({"map": FOUR}, seed)
        done = False
        while not done:
            (image,) = observation.images
            assert image.shape == (64, 64, 3)
            assert image.dtype == np.uint8
            assert seen.setdefault(observation.text, image.tobytes()) == image.tobytes()
            turn = lake.take_turn(MOVES[rng.integers(4)])
            observation, done = turn.observation, turn.done
    assert len(seen) > 10
    assert len(set(seen.values())) == len(seen)


def test_drawn_maps_can_be_solved_and_have_their_size():
    lake = FrozenLake(frozen_share=0.5)
    for level in ("2x2", "4x4", "7x7"):
        spec = lake.draw_spec(level, np.random.default_rng(3))
        assert spec == lake.draw_spec(level, np.random.default_rng(3))
        assert lake.level_of(spec) == level
        assert _reaches_the_goal(spec["map"].split("/"))


def _reaches_the_goal(rows):
    seen, waiting = set(), [(0, 0)]
    while waiting:
        row, column = waiting.pop()
        if not (0 <= row < len(rows) and 0 <= column < len(rows)) or (row, column) in seen or rows[row][column] == "H":
            continue
        seen.add((row, column))
        waiting += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
    return (len(rows) - 1, len(rows) - 1) in seen


@pytest.mark.parametrize("spec", [{}, {"map": ""}, {"map": "FFG"}, {"map": "SF/G"}, {"map": "SXG"}, {"map": 3}])
def test_a_wrong_map_is_refused(spec):
    with pytest.raises(ConfigError, match="map"):
        FrozenLake().begin(spec, 0)


@pytest.mark.parametrize("level", ["", "4", "4x5", "1x1", "99x99", "x"])
def test_a_wrong_level_is_refused(level):
    with pytest.raises(ConfigError, match="4x4"):
        FrozenLake().draw_spec(level, np.random.default_rng(0))


def test_a_lake_without_ice_is_refused():
    with pytest.raises(ConfigError, match="frozen_share is 0; it must be above 0"):
        FrozenLake(frozen_share=0)
