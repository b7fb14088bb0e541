from math import inf

import pytest

from rollwise.evaluation.efficiency import aes, aes_score


@pytest.mark.parametrize(
    ("saving", "gain", "score"),
    [
        (-0.269, 0.409, 0.958),  # -0.269 + 3 * 0.409
        (-0.269, -0.041, -0.474),  # -0.269 - 5 * 0.041
        (0.2, 0.0, 0.2),
        (0.5, -0.1, 0.0),
    ],
)
def test_aes_by_hand(saving, gain, score):
    assert aes_score(saving, gain) == pytest.approx(score)


def test_aes_from_lengths_and_accuracies():
    found = aes(length=1269.0, accuracy=0.3, reference_length=1000.0, reference_accuracy=0.2)
    assert (found.length_saving, found.accuracy_gain) == pytest.approx((-0.269, 0.5))
    assert found.value == pytest.approx(-0.269 + 3 * 0.5)
    worse = aes(length=500.0, accuracy=0.1, reference_length=1000.0, reference_accuracy=0.2)
    assert worse.value == pytest.approx(0.5 - 5 * 0.5)


def test_aes_is_undefined_rather_than_infinite():
    found = aes(10.0, 0.5, 20.0, 0.0)
    assert found.value is None
    assert found.undefined_because == "the reference's accuracy is 0"
    assert found.length_saving == 0.5
    assert aes(10.0, 0.5, 0.0, 0.5).undefined_because == "the reference's mean length is 0 tokens"
    assert aes(inf, 0.5, 20.0, 0.5).value is None
