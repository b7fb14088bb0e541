from itertools import combinations

import numpy as np
import pytest

from rollwise.errors import ConfigError
from rollwise.evaluation.curve import Evaluation
from rollwise.evaluation.measures import (
    avg_at_k,
    mean_lengths,
    mean_over_benchmarks,
    mean_over_problems,
    mean_pass_at_k,
    pass_at_k,
    rollouts_to_target,
)
from rollwise.study.aggregate import mean_over_seeds


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_many_samples_is_stable():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    assert 0.0 < pass_at_k(100_000, 1, 1) == pytest.approx(1e-5)
    assert pass_at_k(100_000, 50_000, 50_000) == 1.0


@pytest.mark.parametrize(("n", "c", "k", "words"), [(4, 5, 1, "c is 5"), (4, -1, 1, "c is -1"), (4, 2, 5, "k is 5")])
def test_pass_at_k_refuses_what_cannot_be(n, c, k, words):
    with pytest.raises(ConfigError, match=words):
        pass_at_k(n, c, k)


def test_means_leave_out_problems_with_too_few_scored_samples():
    counts = [(4, 1), (4, 4), (1, 1), (0, 0)]
    assert mean_pass_at_k(counts, 2).value == pytest.approx((0.5 + 1.0) / 2)
    assert mean_pass_at_k(counts, 2).num_problems == 2
    assert avg_at_k(counts).value == pytest.approx((0.25 + 1 + 1) / 3)
    assert mean_pass_at_k(counts, 8) is None
    assert avg_at_k([(0, 0)]) is None


def test_the_interval_is_the_study_s():
    values = list(np.random.default_rng(1).random(30))
    figure, other = mean_over_problems(values), mean_over_seeds(values)
    assert (figure.value, figure.low, figure.high) == pytest.approx((other.value, other.low, other.high), abs=0.01)
    assert mean_over_problems([0.5]).low is None


def test_the_interval_of_many_problems_is_narrow():
    values = [0.0, 1.0] * 1_000
    figure = mean_over_problems(values)
    assert figure.high - figure.low == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(2_000), rel=0.1)


def test_the_mean_over_benchmarks_is_unweighted():
    figure = mean_over_benchmarks([[1.0] * 100, [0.0, 0.5]])
    assert figure.value == pytest.approx(0.625)
    assert figure.low < 0.625 < figure.high
    assert mean_over_benchmarks([[1.0], []]) is None
    assert mean_over_benchmarks([[1.0], [0.0]]).low is None


def test_rollouts_to_target():
    evaluations = [Evaluation(i, 100 * i, a, float(i)) for i, a in enumerate([0.1, 0.4, 0.3, 0.6])]
    assert rollouts_to_target(evaluations, 0.4) == 100
    assert rollouts_to_target(evaluations, 0.5) == 300
    assert rollouts_to_target(evaluations, 0.7) is None
    assert rollouts_to_target([], 0.7) is None


def test_lengths_of_right_and_wrong_answers_apart():
    assert mean_lengths([10, 20, 60, 90], [True, True, False, None]) == {"all": 45.0, "right": 15.0, "wrong": 60.0}
    assert mean_lengths([], []) == {"all": None, "right": None, "wrong": None}
