import math

import numpy as np
import pytest

from rollwise import ConfigError
from rollwise.diagnostics import StalenessMonitor, effective_sample_size, row_entries


@pytest.mark.parametrize(
    ("weights", "expected"), [([1, 1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([3, 1], 16 / 20), ([5], 1.0)]
)
def test_effective_sample_size_by_hand(weights, expected):
    with np.errstate(divide="ignore"):
        assert effective_sample_size(np.log(weights)) == pytest.approx(expected)


def test_effective_sample_size_does_not_overflow():
    assert effective_sample_size([5000.0, 5000.0, -5000.0, -5000.0]) == pytest.approx(0.5)
    assert math.isnan(effective_sample_size([]))


def test_effective_sample_size_is_at_most_exp_of_minus_kl():
    rng = np.random.default_rng(0)
    for spread in (0.1, 0.5, 1.0):
        policy = rng.normal(0, spread, 50)
        policy -= np.log(np.exp(policy).mean())  # pi / mu over 50 outcomes that mu draws uniformly
        kl = -policy.mean()
        assert effective_sample_size(policy) <= math.exp(-kl) + 1e-12


def monitor(ages, ratios, mask=None, clipped=None, bound=0.5):
    ratios = np.array(ratios, dtype=float)
    mask = np.ones_like(ratios) if mask is None else np.array(mask)
    clipped = np.zeros_like(ratios) if clipped is None else np.array(clipped)
    made = StalenessMonitor(bound)
    made.add(row_entries(ages, np.log(ratios), mask, clipped))
    return made


def test_figures_by_hand_and_by_age():
    figures = monitor(
        ages=[0, 3, 2, 40],
        ratios=[[1, 1], [3, 1], [1, 9], [2, 2]],
        mask=[[1, 1], [1, 1], [1, 0], [1, 1]],
        clipped=[[0, 0], [1, 0], [0, 1], [1, 1]],
    ).figures()
    assert figures["ess_token/age_0"] == figures["ess_sequence/age_0"] == 1.0
    assert figures["kl/age_0"] == 0.0
    # two rows of age 2-3: tokens 3, 1 and 1, the masked one left out
    assert figures["ess_token/age_2-3"] == pytest.approx(25 / (3 * 11))
    assert figures["ess_sequence/age_2-3"] == pytest.approx(16 / (2 * 10))
    assert figures["kl/age_2-3"] == pytest.approx((3 - 1 - math.log(3)) / 3)
    assert figures["clip_fraction/age_2-3"] == pytest.approx(1 / 3)
    assert figures["ratio_q50/age_2-3"] == pytest.approx((math.sqrt(3) + 1) / 2)
    assert figures["clip_fraction/age_32+"] == 1.0
    assert not any(name.endswith(("age_1", "age_4-7", "age_8-15", "age_16-31")) for name in figures)


@pytest.mark.parametrize(("age", "name"), [(1, "1"), (4, "4-7"), (7, "4-7"), (8, "8-15"), (31, "16-31"), (32, "32+")])
def test_ages_at_the_ends_of_bins(age, name):
    assert f"kl/age_{name}" in monitor([age], [[1.0]]).figures()


def test_updates_add_up_until_cleared():
    both = monitor([1], [[2.0]])
    both.add(row_entries([1], [[0.0]], [[1]], [[0]]))
    assert both.figures()["ess_token/age_1"] == pytest.approx(9 / 10)
    both.clear()
    assert both.figures() == {}
    assert both.advice() is None


def test_rows_without_loss_tokens_do_not_count():
    assert monitor([1], [[5.0, 5.0]], mask=[[0, 0]]).figures() == {}


def test_advice_names_the_age_the_value_and_the_bound():
    stale = monitor([1, 1, 5, 5], [[1.0], [1.0], [1.0], [30.0]], bound=0.6)
    assert "age 4-7 steps have a token-level effective sample size of 0.53 (bound 0.6)" in stale.advice()
    assert "lower the age bound" in stale.advice()
    assert monitor([5, 5], [[1.0], [1.1]]).advice() is None
    assert monitor([0, 0], [[1.0], [30.0]], bound=0.6).advice() is None  # fresh rows are not replay's fault


def test_bound_outside_of_its_range():
    with pytest.raises(ConfigError, match="ess_bound is 1.5; it must be between 0 and 1"):
        StalenessMonitor(1.5)
