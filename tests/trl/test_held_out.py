import math

import pytest

pytest.importorskip("trl")

from rollwise.trl.held_out import HeldOut


def test_figures_of_two_batches_by_hand():
    held_out = HeldOut(success_threshold=0.5)
    # Two prompts of two completions, then two more, one of them unscored.
    held_out.add([1.0, 0.0, 0.4, 0.0], [3, 9, 5, 7], ["easy", "easy", "hard", "hard"], 2)
    held_out.add([0.5, math.nan, 0.9, 0.7], [1, 100, 2, 6], ["hard", "hard", "easy", "easy"], 2)
    assert held_out.take() == {
        "accuracy": pytest.approx(4 / 7),
        "accuracy/easy": 3 / 4,
        "accuracy/hard": pytest.approx(1 / 3),
        "pass@2": pytest.approx(2 / 3),  # the prompt with an unscored completion has not been tried twice
        "tokens": 133 / 8,
        "tokens/right": 12 / 4,
        "tokens/wrong": 21 / 3,
    }
    assert held_out.counts == {"easy": (3, 4), "hard": (1, 3)}
    assert held_out.take() == {}
    assert held_out.counts == {}


def test_a_single_completion_per_prompt_has_no_pass_at_k():
    held_out = HeldOut(success_threshold=1.0)
    held_out.add([1.0, 0.0], [2, 2], [None, None], 1)
    assert set(held_out.take()) == {"accuracy", "tokens", "tokens/right", "tokens/wrong"}
