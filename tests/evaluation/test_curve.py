import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_helpers import curve

from rollwise.evaluation.curve import Hit, accuracy_at, first_hit

CURVE = curve((0, 0.2), (100, 0.4), (300, 0.3), (400, 0.7))
SHARES = st.floats(0.0, 1.0, allow_subnormal=False)
CURVES = st.lists(st.tuples(st.integers(1, 500), SHARES), min_size=1, max_size=12).map(
    lambda steps: curve(*zip(np.cumsum([n for n, _ in steps]).tolist(), [a for _, a in steps], strict=True))
)


def test_accuracy_is_interpolated_and_never_extrapolated():
    found = [accuracy_at(CURVE, budget) for budget in (0, 50, 100, 250, 400)]
    assert found == pytest.approx([0.2, 0.3, 0.4, 0.325, 0.7])
    assert accuracy_at(CURVE, 401) is None
    assert accuracy_at(curve((100, 0.5), (200, 0.6)), 99) is None
    assert accuracy_at([], 0) is None


def test_of_evaluations_at_the_same_rollouts_the_last_counts():
    assert accuracy_at(curve((0, 0.2), (100, 0.4), (100, 0.5), (200, 0.7)), 100) == 0.5
    assert accuracy_at(curve((0, 0.2), (100, 0.4), (100, 0.5), (200, 0.7)), 150) == pytest.approx(0.6)


def test_the_first_evaluation_at_the_target_counts_or_the_line_to_it():
    assert first_hit(CURVE, 0.35, "rollouts_generated") == Hit(100.0, True)
    assert first_hit(CURVE, 0.35, "seconds") == Hit(4.0, True)
    assert first_hit(CURVE, 0.35, "rollouts_generated", interpolated=True).value == pytest.approx(75.0)
    assert first_hit(CURVE, 0.5, "seconds", interpolated=True).value == pytest.approx(10.0)  # halfway from 8 to 12
    assert first_hit(CURVE, 0.2, "rollouts_generated", interpolated=True) == Hit(0.0, True)
    assert first_hit(CURVE, 0.71, "rollouts_generated") == Hit(400.0, False)
    assert first_hit(CURVE, 0.71, "seconds", interpolated=True) == Hit(12.0, False)


@given(evaluations=CURVES, share=SHARES)
def test_interpolated_accuracies_stay_between_their_neighbours(evaluations, share):
    low, high = evaluations[0].rollouts_generated, evaluations[-1].rollouts_generated
    budget = low + share * (high - low)
    found = accuracy_at(evaluations, min(budget, high))
    before = [e for e in evaluations if e.rollouts_generated <= budget][-1]
    after = next(e for e in evaluations if e.rollouts_generated >= min(budget, high))
    ends = sorted((before.accuracy, after.accuracy))
    assert ends[0] - 1e-12 <= found <= ends[1] + 1e-12


@given(evaluations=CURVES, target=SHARES)
def test_interpolation_gains_at_most_one_interval(evaluations, target):
    plain = first_hit(evaluations, target, "rollouts_generated")
    exact = first_hit(evaluations, target, "rollouts_generated", interpolated=True)
    assert plain.reached == exact.reached == any(e.accuracy >= target for e in evaluations)
    earlier = [e.rollouts_generated for e in evaluations if e.rollouts_generated < plain.value]
    assert (earlier[-1] if earlier and plain.reached else plain.value) <= exact.value + 1e-9
    assert exact.value <= plain.value + 1e-9
