import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from study_helpers import curve, finished_run

from rollwise.evaluation.curve import Evaluation, Hit
from rollwise.study.aggregate import (
    Estimate,
    FinishedRun,
    aggregate,
    default_budgets,
    default_target,
    hit_ratio,
    mean_over_seeds,
    peak_mean,
    plain,
    ratio_of_means,
    restricted_mean,
)

CURVE = curve((0, 0.2), (100, 0.4), (300, 0.3), (400, 0.7))
PLAIN = [
    finished_run("plain", 0, (0, 0.2), (100, 0.4), (200, 0.6), trained=40),
    finished_run("plain", 1, (0, 0.2), (100, 0.3), (200, 0.5), trained=80),
]
REPLAY = [
    finished_run("replay", 0, (0, 0.2), (100, 0.6), (200, 0.6), replayed=30),
    finished_run("replay", 1, (0, 0.2), (100, 0.5), (200, 0.7), replayed=50),
]


def test_the_interval_of_two_seeds_by_hand():
    """Means of two draws from {0, 1} are 0, .5 and 1 with probabilities 1/4, 1/2 and 1/4."""
    assert mean_over_seeds([0.0, 1.0]) == Estimate(0.5, 0.0, 1.0, 2)


def test_an_interval_is_scipys_percentile_bootstrap():
    values = np.random.default_rng(3).normal(0.5, 0.1, size=12)
    mine = mean_over_seeds(values)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=50_000, method="percentile", rng=1).confidence_interval
    assert mine.value == pytest.approx(values.mean())
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), abs=0.003)  # Monte Carlo
    assert mine.high - mine.low > 0.05


def test_the_interval_of_a_ratio_keeps_seeds_paired():
    """Each seed's ratio is 2, so paired resamples all give 2; unpaired ones would not."""
    assert ratio_of_means([2.0, 4.0, 20.0], [1.0, 2.0, 10.0]) == Estimate(2.0, 2.0, 2.0, 3)
    above, below = np.array([3.0, 5.0, 8.0, 9.0, 4.0, 6.0]), np.array([2.0, 2.5, 5.0, 3.0, 3.0, 2.0])
    mine = ratio_of_means(above, below)
    theirs = stats.bootstrap(
        (above, below),
        lambda x, y, axis: x.mean(axis) / y.mean(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=50_000,
        rng=1,
    ).confidence_interval
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), abs=0.03)


def test_one_seed_has_no_interval_and_none_no_figure():
    assert mean_over_seeds([0.5]) == Estimate(0.5, None, None, 1)
    assert mean_over_seeds([]) is None
    assert ratio_of_means([1.0, 1.0], [1.0, 0.0]) is None


def test_runs_that_never_get_there_count_as_their_budget_and_say_so():
    assert restricted_mean([Hit(100, True), Hit(300, True)]).bound == "="
    restricted = restricted_mean([Hit(100, True), Hit(300, False)])
    assert (restricted.value, restricted.bound) == (200.0, ">=")
    here, never = [Hit(100, True), Hit(200, True)], [Hit(200, True), Hit(400, False)]
    assert (hit_ratio(never, here).value, hit_ratio(never, here).bound) == (2.0, ">=")
    assert (hit_ratio(here, never).value, hit_ratio(here, never).bound) == (0.5, "<=")
    assert hit_ratio(never, never).bound == "?"


def test_the_default_target_and_budgets():
    assert peak_mean(PLAIN) == pytest.approx(0.55)
    assert peak_mean(REPLAY) == pytest.approx(0.65)
    short = finished_run("plain", 2, (0, 0.2), (100, 0.8))  # ended early: only shared steps have a mean
    assert peak_mean([*PLAIN, short]) == pytest.approx(0.5)
    assert default_target({"plain": PLAIN, "replay": REPLAY}) == pytest.approx(0.55)
    assert default_budgets(PLAIN + REPLAY) == [50, 100, 150, 200]
    assert default_budgets([finished_run("a", 0, (0, 0.1), (2, 0.2))]) == [1, 2]


def test_a_study_by_hand():
    found = aggregate(PLAIN + REPLAY, arms=["plain", "replay"], baseline="plain", target=0.5)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["budget_rollouts"] == [50, 100, 150, 200]
    plain, replay = found["arms"]["plain"], found["arms"]["replay"]

    def figures(estimates):
        return [pytest.approx((e["value"], e["low"], e["high"])) for e in estimates]

    assert figures(plain["accuracy"]) == [(0.275, 0.25, 0.3), (0.35, 0.3, 0.4), (0.45, 0.4, 0.5), (0.55, 0.5, 0.6)]
    assert figures(replay["accuracy_difference"]) == [
        (0.1, 0.1, 0.1),
        (0.2, 0.2, 0.2),
        (0.15, 0.1, 0.2),
        (0.1, 0.0, 0.2),
    ]
    assert plain["accuracy_difference"] == [None] * 4
    assert plain["rollouts_to_target"]["value"] == 200.0
    assert replay["rollouts_to_target"]["value"] == 100.0
    assert replay["rollouts_ratio"] == {"value": 2.0, "low": 2.0, "high": 2.0, "num_seeds": 2, "bound": "="}
    assert replay["seconds_to_target"]["value"] == 4.0
    assert replay["seconds_ratio"]["value"] == 2.0
    assert plain["rollouts_ratio"] is None
    assert plain["share_trained"]["value"] == pytest.approx(120 / 400)
    assert (plain["rows_replayed"]["value"], replay["rows_replayed"]["value"]) == (0.0, 40.0)
    assert replay["seconds"]["value"] == 9.0
    assert (plain["share_reached"], replay["share_reached"]) == (1.0, 1.0)


def test_interpolation_is_passed_on():
    runs = PLAIN + REPLAY
    found = aggregate(runs, arms=["plain", "replay"], baseline="plain", target=0.5, interpolated=True)
    assert found["arms"]["plain"]["rollouts_to_target"]["value"] == pytest.approx((150 + 200) / 2)
    assert found["arms"]["replay"]["rollouts_to_target"]["value"] == pytest.approx((75 + 100) / 2)


def test_only_shared_seeds_are_paired_and_short_runs_are_left_out_where_they_did_not_get():
    short = finished_run("replay", 2, (0, 0.9), (100, 1.0))
    runs = [PLAIN[1], *REPLAY, short]
    found = aggregate(runs, arms=["plain", "replay", "none"], baseline="plain", target=0.65, budget_rollouts=[100, 200])
    replay = found["arms"]["replay"]
    assert list(found["arms"]) == ["plain", "replay"]
    assert [e["num_seeds"] for e in replay["accuracy"]] == [3, 2]
    assert replay["accuracy"][1]["value"] == pytest.approx(0.65)
    assert [e["num_seeds"] for e in replay["accuracy_difference"]] == [1, 1]
    assert replay["accuracy_difference"][1]["value"] == pytest.approx(0.2)
    assert replay["share_reached"] == pytest.approx(2 / 3)
    assert replay["rollouts_to_target"]["bound"] == ">="
    assert (replay["rollouts_ratio"]["value"], replay["rollouts_ratio"]["bound"]) == (1.0, ">=")


def test_without_a_finished_baseline_there_is_nothing_to_compare_with():
    found = aggregate(REPLAY, arms=["plain", "replay"], baseline="plain")
    assert found["target_is_default"]
    assert found["arms"]["replay"]["rollouts_ratio"] is None
    assert found["arms"]["replay"]["accuracy_difference"] == [None] * 4


@settings(deadline=None)
@given(values=st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=8), scale=st.floats(0.1, 10.0))
def test_an_interval_lies_within_the_values_and_scales_with_them(values, scale):
    found = mean_over_seeds(values)
    assert min(values) - 1e-12 <= found.low <= found.high <= max(values) + 1e-12
    assert found.low - 1e-12 <= found.high
    scaled = mean_over_seeds([scale * value for value in values])
    assert (scaled.low, scaled.high) == pytest.approx((scale * found.low, scale * found.high), abs=1e-9)
    assert mean_over_seeds(values) == found


def test_what_the_last_evaluations_say_is_averaged_paired_and_scored():
    def run(arm, seed, **held_out):
        return replace(finished_run(arm, seed, (0, 0.1), (100, 0.2)), held_out=held_out)

    runs = [
        run("grpo", 0, accuracy=0.2, tokens=10.0, **{"accuracy/easy": 0.3}),
        run("grpo", 1, accuracy=0.4, tokens=10.0, **{"accuracy/easy": 0.5}),
        run("replay", 0, accuracy=0.3, tokens=9.0, **{"accuracy/easy": 0.6}),
        run("replay", 1, accuracy=0.2, tokens=12.0),
    ]
    found = aggregate(runs, arms=["grpo", "replay"], baseline="grpo")["arms"]
    assert found["grpo"]["held_out"]["accuracy/easy"]["value"] == pytest.approx(0.4)
    assert found["replay"]["held_out"]["accuracy/easy"] == plain(Estimate(0.6, None, None, 1))
    assert found["replay"]["held_out_difference"]["accuracy"]["value"] == pytest.approx((0.1 - 0.2) / 2)
    assert found["replay"]["held_out_difference"]["accuracy/easy"]["value"] == pytest.approx(0.3)
    assert found["replay"]["aes"]["value"] == pytest.approx(((0.1 + 3 * 0.5) + (-0.2 - 5 * 0.5)) / 2)
    assert found["grpo"]["aes"] is None


def test_at_equal_training_compute_rows_count_and_not_rollouts():
    def run(arm, *points):
        evaluations = [
            Evaluation(i, rollouts, accuracy, 1.0, rows) for i, (rollouts, rows, accuracy) in enumerate(points)
        ]
        return FinishedRun(arm, 0, evaluations, finished_run(arm, 0, (0, 0.1), (200, 0.1)).totals)

    runs = [run("grpo", (0, 0, 0.2), (200, 80, 0.4)), run("replay", (0, 0, 0.2), (200, 160, 0.6))]
    found = aggregate(runs, arms=["grpo", "replay"], baseline="grpo")
    assert found["rows_trained"] == [20, 40, 60, 80]
    assert found["arms"]["grpo"]["accuracy_at_rows_trained"][-1]["value"] == pytest.approx(0.4)
    assert found["arms"]["replay"]["accuracy_at_rows_trained"][-1]["value"] == pytest.approx(0.4)
    assert found["arms"]["replay"]["difference_at_rows_trained"][1]["value"] == pytest.approx(0.0)
    assert found["arms"]["replay"]["accuracy_difference"][-1]["value"] == pytest.approx(0.2)
