"""What holds for every environment that comes with the package, whatever a model says."""

import math

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise.tasks.levels import ENVIRONMENTS, environment_class, make_environment

SPECS = {
    "frozen_lake": {"map": "SFFF/FHFH/FFFH/HFFG"},
    "sokoban": {"board": "########/#_.____#/#_$_@__#/#___$__#/#____._#/########"},
    "cliff_walking": {"rows": 3, "columns": 4, "start": [2, 0]},
    "search_qa": {"question": "Capital of France?", "answers": ["Paris"]},
    "math": {"problem": "Two and two?", "answer": "4"},
    "countdown": {"numbers": [3, 4, 5], "target": 35},
}
BOUNDS = {
    "frozen_lake": (-0.1, 1.0),
    "sokoban": (-1.1, 11.9),
    "cliff_walking": (-100.0, -0.1),
    "search_qa": (-0.1, 1.0),
    "math": (0.0, 1.0),
    "countdown": (-0.1, 1.0),
}
WORDS = [
    *("<action>", "</action>", "<answer>", "</answer>", "<search>", "</search>", "<think>", "</think>"),
    *("left", "up", "right", "down", "L", "3", "Paris", "capital", "(3+4)*5", "35", "\\boxed{4}", "\\boxed{", "}"),
    *(" ", "\n", "\x00", "\ud800", "é", "action:", "=", "/0"),
]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "passages.jsonl"
    path.write_text('{"title": "Paris", "text": "the capital of France"}\n{"title": "", "text": "nothing"}\n')

    def make_one(name, **more):
        return make_environment(name, **({"corpus": str(path)} if name == "search_qa" else {}), **more)

    return make_one


def test_all_are_here():
    assert set(ENVIRONMENTS) == set(SPECS) == set(BOUNDS)


@pytest.mark.parametrize("name", ENVIRONMENTS)
@settings(max_examples=40, deadline=None)
@given(answers=st.lists(st.lists(st.sampled_from(WORDS), max_size=5).map("".join), max_size=6), seed=st.integers(0, 9))
def test_no_answer_breaks_an_episode(make, name, answers, seed):
    environment = make(name, max_turns=4, timeout_seconds=60.0)
    observation = environment.begin(SPECS[name], seed)
    assert environment.observation_space.contains({"text": observation.text})
    lowest, highest = BOUNDS[name]
    for number, answer in enumerate(answers, 1):
        turn = environment.take_turn(answer)
        assert turn.unscored is None
        assert lowest - 1e-9 <= turn.reward <= highest + 1e-9
        assert environment.observation_space.contains({"text": turn.observation.text})
        assert turn.done or number < 4
        if turn.is_malformed:
            assert turn.reward == environment.malformed_reward
            assert not turn.is_success
        if turn.done:
            break


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_same_seed_and_answers_give_the_same_episode(make, name):
    slips = {"slippery": True} if name in ("frozen_lake", "cliff_walking") else {}

    def episode(seed):
        environment = make(name, max_turns=12, timeout_seconds=60.0, **slips)
        turns = [environment.begin(SPECS[name], seed)]
        for number in range(12):
            turns.append(environment.take_turn(f"<action>{('up', 'right')[number % 2]}</action>"))
            if turns[-1].done:
                break
        return turns

    assert episode(1) == episode(1)
    if slips:
        assert len({str(episode(seed)) for seed in range(10)}) > 3


class OnOneLevel(gymnasium.Wrapper):
    """Gymnasium's checker gives no level."""

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed, options={"spec": SPECS[self.env.name]})


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version")
def test_each_is_a_gymnasium_environment(make, name):
    mode = "rgb_array" if environment_class(name).has_pictures else "ansi"
    environment = OnOneLevel(make(name, render_mode=mode, max_turns=3, timeout_seconds=60.0))
    check_env(environment, skip_render_check=True)
    assert np.shape(environment.render()) == ((64, 64, 3) if mode == "rgb_array" else ())


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_instructions_name_an_answer_that_is_understood(make, name):
    """What the model is told to write is what is read."""
    environment = make(name, timeout_seconds=60.0)
    shown = environment.instructions
    for answer in ("<action>right</action>", "<search>", "<answer>", "\\boxed{"):
        if answer in shown:
            break
    else:
        pytest.fail(f"no answer in {shown!r}")
    full = {"<search>": "<search>words</search>", "<answer>": "<answer>(3 + 4) * 5</answer>", "\\boxed{": "\\boxed{4}"}
    environment.begin(SPECS[name], 0)
    turn = environment.take_turn(full.get(answer, answer))
    assert not turn.is_malformed
    assert math.isfinite(turn.reward)
