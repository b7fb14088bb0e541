"""CliffWalking takes Gymnasium's course."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rollwise.errors import ConfigError
from rollwise.tasks.cliff_walking import STANDARD, CliffWalking

MOVES = ("up", "right", "down", "left")


@pytest.mark.parametrize("slippery", [False, True])
def test_the_course_is_gymnasiums_with_the_same_seed(slippery):
    rng = np.random.default_rng(0)
    rewards, ends = set(), 0
    for seed in range(40):
        theirs = gymnasium.make("CliffWalking-v1", is_slippery=slippery).unwrapped
        ours = CliffWalking(slippery=slippery, max_turns=1000)
        state, _ = theirs.reset(seed=seed)
        text = ours.begin(STANDARD, seed).text
        for _ in range(60):
            row, column = divmod(int(state), 12)
            assert text.split("\n")[row][column] in "PW"
            assert text.count("P") + text.count("W") == 1
            move = int(rng.choice(4, p=[0.25, 0.45, 0.2, 0.1]))
            state, reward, done, _, _ = theirs.step(move)
            turn = ours.take_turn(rng.choice([MOVES[move], str(move)]))
            text = turn.observation.text
            assert (turn.reward, turn.terminated, turn.is_success) == (reward, done, done)
            rewards.add(reward)
            if done:
                ends += 1
                break
    assert rewards == {-1, -100}
    assert ends > 0


def test_the_shortest_way():
    cliff = CliffWalking(goal_reward=5.0, step_reward=-0.5)
    assert cliff.begin(STANDARD, 0).text == "_" * 12 + "\n" + "_" * 12 + "\n" + "_" * 12 + "\nPCCCCCCCCCCG"
    turns = [cliff.take_turn(move) for move in ("up", *["right"] * 11, "down")]
    assert [turn.reward for turn in turns] == [-0.5] * 12 + [5.0]
    assert turns[-1].terminated
    assert turns[-1].observation.text.endswith("CW")


@pytest.mark.parametrize("picture", [False, True])
def test_it_is_a_gymnasium_environment(picture):
    check_env(CliffWalking(picture=picture, render_mode="ansi"), skip_render_check=True)


def test_starts_are_all_the_free_places():
    rng = np.random.default_rng(0)
    cliff = CliffWalking()
    starts = set()
    for _ in range(300):
        spec = cliff.draw_spec("3x4", rng)
        cliff.begin(spec, 0)
        starts.add(tuple(spec["start"]))
    assert starts == {(row, column) for row in (0, 1) for column in range(4)} | {(2, 0)}
    assert cliff.level_of(spec) == "3x4"


@pytest.mark.parametrize(
    "spec",
    [{}, STANDARD | {"start": 3}, STANDARD | {"start": [3, 1]}, STANDARD | {"start": [4, 0]}, STANDARD | {"rows": 1}],
)
def test_a_wrong_spec_is_refused(spec):
    with pytest.raises(ConfigError, match="start|spec"):
        CliffWalking().begin(spec, 0)


def test_a_wrong_level_is_refused():
    with pytest.raises(ConfigError, match="'4x12'"):
        CliffWalking().draw_spec("1x1", np.random.default_rng(0))
