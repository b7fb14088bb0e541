"""Where the success rates come from."""

import numpy as np
import pytest
from scipy import optimize, stats

from rollwise.errors import ConfigError
from rollwise.simulation import PRESETS, Rates, estimate_rates, parse_bins, zero_variance_share


def test_bins_by_hand():
    low, high, share = parse_bins("0:0.4, 0.1-0.5:0.2,1:0.2")
    assert low.tolist() == [0.0, 0.1, 1.0]
    assert high.tolist() == [0.0, 0.5, 1.0]
    assert share.tolist() == pytest.approx([0.5, 0.25, 0.25])
    rates = Rates.bins("0:0.4,0.1-0.5:0.2,1:0.2").sample(40_000, np.random.default_rng(0))
    assert (rates == 0).mean() == pytest.approx(0.5, abs=0.01)
    assert (rates == 1).mean() == pytest.approx(0.25, abs=0.01)
    middle = rates[(rates > 0) & (rates < 1)]
    assert (middle.min(), middle.max()) == pytest.approx((0.1, 0.5), abs=1e-3)
    assert middle.mean() == pytest.approx(0.3, abs=0.005)


def test_presets_waste_what_they_say():
    found = {
        name: zero_variance_share(Rates.preset(name).sample(50_000, np.random.default_rng(0)), 16) for name in PRESETS
    }
    assert found == pytest.approx({"rlvr": 0.70, "hard": 0.54, "flat": 0.12}, abs=0.015)


@pytest.mark.parametrize(("a", "b"), [(0.2, 0.3), (2.0, 3.0), (0.5, 4.0)])
def test_the_fit_is_the_maximum_of_the_likelihood(a, b):
    rng = np.random.default_rng(3)
    total = rng.integers(4, 17, 3000)
    correct = rng.binomial(total, rng.beta(a, b, 3000))
    found = estimate_rates(correct, total)

    def loss(logs):
        return -stats.betabinom.logpmf(correct, total, *np.exp(logs)).sum()

    best = np.exp(optimize.minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-6}).x)
    assert found == pytest.approx(tuple(best), rel=2e-3)
    assert found == pytest.approx((a, b), rel=0.15)


def test_few_pilots_give_the_share_of_zero_variance_groups_back():
    """The raw shares of 8 pilots overstate it, the fitted posterior does not."""
    rng = np.random.default_rng(5)
    true = rng.beta(0.3, 0.5, 20_000)
    correct = rng.binomial(8, true)
    rates = Rates.counted(correct, np.full(20_000, 8)).sample(None, rng)
    truth = zero_variance_share(true, 16)
    assert zero_variance_share(rates, 16) == pytest.approx(truth, abs=0.015)
    assert zero_variance_share(correct / 8, 16) > truth + 0.03


@pytest.mark.parametrize("correct", [[0, 0, 0], [8, 8, 8], [4, 4, 4]])
def test_counts_without_a_maximum_stay_in_bounds(correct):
    a, b = estimate_rates(correct, [8, 8, 8])
    assert 1e-3 <= min(a, b) <= max(a, b) <= 1e4
    mean = a / (a + b)
    assert mean == pytest.approx(correct[0] / 8, abs=0.01)


def test_known_prompts_are_the_pool():
    rates = Rates.listed([0.0, 0.25, 1.0])
    assert rates.sample(None, np.random.default_rng(0)).tolist() == [0.0, 0.25, 1.0]
    assert rates.sample(3, np.random.default_rng(0)).tolist() == [0.0, 0.25, 1.0]
    assert set(rates.sample(100, np.random.default_rng(0)).tolist()) == {0.0, 0.25, 1.0}
    with pytest.raises(ConfigError, match="number of prompts is missing"):
        Rates.preset("rlvr").sample(None, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: parse_bins("0.4"), "is no bin"),
        (lambda: parse_bins("1.4:1"), "out of bounds"),
        (lambda: parse_bins("0.4:0"), "sum to 0"),
        (lambda: Rates.preset("rvlr"), "name one of rlvr"),
        (lambda: Rates.listed([0.5, 2.0]), r"each in \[0, 1\]"),
        (lambda: Rates.preset("flat").sample(0, np.random.default_rng(0)), "must be at least 1"),
        (lambda: estimate_rates([1, 9], [8, 8]), "prompt 1 has 9 of 8"),
        (lambda: estimate_rates([0.5], [1]), "whole numbers"),
        (lambda: estimate_rates([1], [1, 2]), "one of each per prompt"),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
