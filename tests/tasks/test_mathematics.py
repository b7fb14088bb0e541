"""Mathematical problems: right, wrong, malformed, unscored."""

import pytest

from rollwise.errors import ConfigError
from rollwise.tasks.mathematics import Mathematics, math_reward

SPEC = {"problem": "What is 1/2 + 1/4?", "answer": "\\frac{3}{4}"}
HANGS = r"\boxed{9^{9^{9^{9^9}}}}"


def test_one_turn_and_its_reward():
    mathematics = Mathematics(right_reward=2.0, wrong_reward=-1.0, malformed_reward=-3.0, timeout_seconds=60.0)
    for answer, reward in (
        ("so \\boxed{\\frac34}", 2.0),
        ("The answer is 0.75", 2.0),
        ("\\boxed{1}", -1.0),
        ("no idea", -3.0),
    ):
        assert mathematics.begin(SPEC, 0).text == SPEC["problem"]
        turn = mathematics.take_turn(answer)
        assert (turn.reward, turn.terminated, turn.is_success) == (reward, True, reward == 2.0)
        assert turn.is_malformed == (reward == -3.0)


def test_what_hangs_or_cannot_be_read_is_unscored():
    mathematics = Mathematics(timeout_seconds=1.0)
    mathematics.begin(SPEC, 0)
    turn = mathematics.take_turn(HANGS)
    assert (turn.reward, turn.done) == (None, True)
    assert "1 s" in turn.unscored or "timeout_seconds" in turn.unscored
    mathematics = Mathematics(timeout_seconds=60.0)
    mathematics.begin(SPEC | {"answer": "?"}, 0)
    assert mathematics.take_turn("it is 4").unscored == "the right answer cannot be read"


def test_the_reward_function_of_trl():
    texts = ["\\boxed{4}", [{"role": "assistant", "content": "it is 5"}], []]
    texts.append([{"role": "assistant", "content": [{"type": "text", "text": "$4$"}]}])
    assert math_reward(completions=texts, answer=["4", 4, "4", "4.0"], prompts=None) == [1.0, 0.0, 0.0, 1.0]
    assert math_reward(["it is 4"], answer=["?"]) == [None]
    with pytest.raises(ConfigError, match="1 completions but 2 answers"):
        math_reward(["4"], answer=["4", "5"])


@pytest.mark.parametrize("spec", [{}, {"problem": "1+1?"}, SPEC | {"answer": " "}, SPEC | {"answer": 3}])
def test_a_wrong_spec_is_refused(spec):
    with pytest.raises(ConfigError, match="needs it as a text"):
        Mathematics().begin(spec, 0)
