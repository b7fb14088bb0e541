"""Drawing without replacement, against the exact probabilities of every ordered draw."""

import math
from collections import Counter

import numpy as np
import pytest
from core_helpers import P_BOUND, chi_square_p_value, sequential_probabilities
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise.replay.sampling import draw_without_replacement

REPEATS = 12_000


def observed_draws(log_weights, num_draws, seed=1, repeats=REPEATS):
    rng = np.random.default_rng(seed)
    log_weights = np.array(log_weights, dtype=np.float64)
    return Counter(tuple(draw_without_replacement(log_weights, num_draws, rng).tolist()) for _ in range(repeats))


@pytest.mark.parametrize(
    ("weights", "num_draws"),
    [
        ([1, 1, 1, 1], 2),
        ([0.5, 1, 2, 4], 3),
        ([100, 1, 1, 1, 1], 2),  # a stratified or overdrawn-and-sorted draw is far off here
        ([5, 1, 4, 0.2, 3, 2, 1], 3),
        ([9, 3, 1], 1),
        ([7, 2], 2),
    ],
)
def test_ordered_draws_have_the_sequential_probabilities(weights, num_draws):
    draws = observed_draws(np.log(weights), num_draws)
    assert chi_square_p_value(draws, sequential_probabilities(weights, num_draws)) > P_BOUND


def test_the_chi_square_test_can_fail():
    """Draws by probability proportional to size with replacement, duplicates dropped by sorting: wrong, and seen."""
    rng = np.random.default_rng(0)
    weights = np.array([100, 1, 1, 1, 1.0])
    wrong = Counter(
        tuple(np.unique(rng.choice(5, size=30, p=weights / weights.sum()))[:2].tolist()) for _ in range(REPEATS)
    )
    wrong = Counter({key: n for key, n in wrong.items() if len(key) == 2})
    assert chi_square_p_value(wrong, sequential_probabilities(weights, 2)) < 1e-10


@pytest.mark.parametrize(
    "log_weights",
    [
        [math.log(5e-324), math.log(1e-323), math.log(1.5e-323)],  # denormal weights
        [-2000.0, -2000.0 + math.log(2), -2000.0 + math.log(3)],  # exp() is 0
        [2000.0, 2000.0 + math.log(2), 2000.0 + math.log(3)],  # exp() is inf
        [1e6, 1e6 + math.log(2), 1e6 + math.log(3)],
    ],
)
def test_only_differences_of_log_weights_matter(log_weights):
    draws = observed_draws(log_weights, 2)
    assert chi_square_p_value(draws, sequential_probabilities([1, 2, 3], 2)) > P_BOUND


def test_weights_a_million_apart_come_in_order():
    log_weights = [0.0, -1e6, 1e6, -2e6, 0.5e6]
    assert observed_draws(log_weights, 5, repeats=200) == {(2, 4, 0, 1, 3): 200}
    assert observed_draws(log_weights, 2, repeats=200) == {(2, 4): 200}


def test_weight_zero_is_never_drawn():
    draws = observed_draws([0.0, -math.inf, 0.0, -math.inf, math.log(2)], 2)
    assert chi_square_p_value(draws, sequential_probabilities([1, 0, 1, 0, 2], 2)) > P_BOUND


@pytest.mark.parametrize("num_draws", [3, 4, 5, 1000])
def test_more_than_there_is_gives_what_there_is(num_draws):
    draws = observed_draws([0.0, -math.inf, -5000.0, -math.inf, 3.0], num_draws, repeats=100)
    assert {tuple(sorted(draw)) for draw in draws} == {(0, 2, 4)}


@pytest.mark.parametrize(
    ("log_weights", "num_draws"),
    [([], 0), ([], 3), ([0.0, 0.0], 0), ([-math.inf] * 3, 2), ([0.0, 0.0], -1)],
)
def test_nothing_to_draw(log_weights, num_draws):
    drawn = draw_without_replacement(np.array(log_weights, dtype=np.float64), num_draws, np.random.default_rng(0))
    assert drawn.shape == (0,)
    assert np.arange(3)[drawn].tolist() == []  # usable as an index


def test_the_generator_moves_on_by_n_numbers_whatever_is_drawn():
    """So that two runs whose buffers are equally long stay in step."""
    states = set()
    for log_weights, num_draws in (([0.0] * 5, 2), ([-math.inf] * 5, 5), ([1.0, 2.0, 3.0, -9e9, 0.0], 1)):
        rng = np.random.default_rng(3)
        draw_without_replacement(np.array(log_weights), num_draws, rng)
        states.add(rng.integers(1 << 60))
    assert len(states) == 1


finite = st.floats(-1e6, 1e6)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(finite, st.just(-math.inf)), max_size=40), st.integers(0, 50), st.integers(0, 2**32))
def test_draws_are_distinct_live_positions(log_weights, num_draws, seed):
    log_weights = np.array(log_weights, dtype=np.float64)
    drawn = draw_without_replacement(log_weights, num_draws, np.random.default_rng(seed)).tolist()
    live = set(np.flatnonzero(log_weights > -math.inf).tolist())
    assert len(drawn) == len(set(drawn)) == min(num_draws, len(live))
    assert set(drawn) <= live
    fewer = draw_without_replacement(log_weights, num_draws // 2, np.random.default_rng(seed)).tolist()
    assert fewer == drawn[: num_draws // 2]  # a shorter draw is the longer one's beginning
