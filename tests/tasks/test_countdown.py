"""Countdown's expressions are read safely and exactly, and its levels can be solved."""

from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise.errors import ConfigError
from rollwise.tasks.countdown import Countdown, evaluate_expression


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("1+2*3", 7, [1, 2, 3]),
        ("(25 \u2212 7) \u00d7 4 = 72", 72, [25, 7, 4]),
        ("10/4", Fraction(5, 2), [10, 4]),
        ("1/3*3", 1, [1, 3, 3]),
        ("-(2-5)", 3, [2, 5]),
        ("8 ÷ 2 - 4", 0, [8, 2, 4]),
        ("7", 7, [7]),
    ],
)
def test_expressions(text, value, numbers):
    assert evaluate_expression(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "= 3",
        "1/0",
        "1/(2-2)",
        "2**3",
        "9**9**9",
        "7//2",
        "1.5+2",
        "x+1",
        "__import__('os')",
        "1(2)",
        "()",
        "(1",
        "1,2",
        "007",
        "+1",
        "~1",
        "1_0",
        "1e3",
        "1+" * 101 + "1",
        "(" * 99 + "1" + ")" * 99 + "+1+1",
    ],
)
def test_what_is_no_expression(text):
    assert evaluate_expression(text) is None


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet="0123456789+-*/() =", max_size=220))
def test_any_text_gives_a_value_or_none(text):
    found = evaluate_expression(text)
    assert found is None or isinstance(found[0], Fraction)


def can_be_reached(numbers, target):
    """Try all orders, operations and brackets."""
    if len(numbers) == 1:
        return numbers[0] == target
    for first, second, *rest in permutations(numbers):
        results = [first + second, first - second, first * second, *([first / second] if second else [])]
        if any(can_be_reached([result, *rest], target) for result in results):
            return True
    return False


def test_levels_can_be_solved_and_come_from_the_seed():
    countdown = Countdown(max_number=20)
    rng = np.random.default_rng(1)
    for level, size in (("numbers-2", 2), ("numbers-3", 3), ("numbers-4", 4)):
        for _ in range(10):
            spec = countdown.draw_spec(level, rng)
            assert countdown.level_of(spec) == level
            assert len(spec["numbers"]) == size
            assert max(spec["numbers"]) <= 20
            assert 0 < spec["target"] <= 200
            assert can_be_reached([Fraction(number) for number in spec["numbers"]], spec["target"])
    assert countdown.draw_spec("numbers-4", np.random.default_rng(5)) == countdown.draw_spec(
        "numbers-4", np.random.default_rng(5)
    )


SPEC = {"numbers": [25, 7, 4], "target": 72}


@pytest.mark.parametrize(
    ("answer", "must_use_all", "reward", "is_malformed"),
    [
        ("<answer>(25 - 7) * 4</answer>", True, 1.0, False),
        ("<think>7*4</think> 4*(25-7)", True, 1.0, False),
        ("25 + 7 + 4", True, 0.0, False),
        ("72", True, 0.0, False),
        ("(25-7)*4 + 7 - 7", True, 0.0, False),
        ("I do not know", True, -0.1, True),
        ("<answer></answer> (25-7)*4", True, -0.1, True),
        ("4*(25-7)", False, 1.0, False),
        ("4*25 - 7*4", False, 0.0, False),
    ],
)
def test_rewards(answer, must_use_all, reward, is_malformed):
    countdown = Countdown(must_use_all=must_use_all)
    assert countdown.begin(SPEC, 0).text == "Numbers: 25, 7, 4. Target: 72."
    turn = countdown.take_turn(answer)
    assert (turn.reward, turn.is_malformed, turn.is_success, turn.done) == (reward, is_malformed, reward == 1, True)


def test_not_all_numbers_need_be_used_where_it_says_so():
    for must_use_all, reward in ((True, 0.0), (False, 1.0)):
        countdown = Countdown(must_use_all=must_use_all)
        countdown.begin({"numbers": [3, 4, 9], "target": 7}, 0)
        assert countdown.take_turn("3+4").reward == reward


def test_several_attempts():
    countdown = Countdown(max_turns=3, wrong_reward=-0.5)
    countdown.begin(SPEC, 0)
    turn = countdown.take_turn("25+7+4")
    assert turn.observation.text == "That is 36. Numbers: 25, 7, 4. Target: 72."
    assert "does not use" in countdown.take_turn("72").observation.text
    turn = countdown.take_turn("(25-7)*4")
    assert (turn.reward, turn.terminated) == (1.0, True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["(25-7)*4", "1", "25", "<answer>", "</answer>", "+", "=", "/0"]), max_size=5))
def test_rewards_are_bounded_whatever_is_said(pieces):
    countdown = Countdown()
    countdown.begin(SPEC, 0)
    assert countdown.take_turn("".join(pieces)).reward in (1.0, 0.0, -0.1)


def test_it_is_a_gymnasium_environment():
    check_env(Countdown(render_mode="ansi", max_turns=3), skip_render_check=True)


@pytest.mark.parametrize("spec", [{}, {"numbers": []}, SPEC | {"numbers": [1, -2]}, SPEC | {"target": "7"}])
def test_a_wrong_spec_is_refused(spec):
    with pytest.raises(ConfigError, match="numbers|target"):
        Countdown().begin(spec, 0)


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="numbers-2"):
        Countdown().draw_spec("numbers-9", np.random.default_rng(0))
    with pytest.raises(ConfigError, match="max_number is 3"):
        Countdown(max_number=3)
