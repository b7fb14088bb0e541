import json

import pytest

from rollwise.commands.baseline import compare, step_budget
from rollwise.evaluation.curve import Evaluation, first_at_or_above


def history(*points):
    """Evaluations from (rollouts, accuracy) pairs, ten steps and ten seconds apart."""
    return [Evaluation(10 * i, rollouts, accuracy, 10.0 * i) for i, (rollouts, accuracy) in enumerate(points)]


RUN = history((0, 0.2), (1000, 0.4), (2000, 0.5), (3000, 0.45))


def test_the_first_evaluation_at_or_above_counts_without_interpolation():
    evaluations = history((0, 0.2), (1000, 0.39), (2000, 0.41), (3000, 0.4))
    assert first_at_or_above(evaluations, 0.4).rollouts_generated == 2000
    assert first_at_or_above(evaluations, 0.2).rollouts_generated == 0
    assert first_at_or_above(evaluations, 0.42) is None
    assert first_at_or_above([], 0.1) is None


def test_both_runs_are_read_the_same_way():
    comparison = compare(RUN, history((0, 0.2), (4000, 0.44), (5000, 0.46)), rollouts=5000, ended_by="rollouts")
    assert comparison.target == 0.45
    assert comparison.run.rollouts_generated == 2000  # the run was there before its end
    assert comparison.baseline.rollouts_generated == 5000
    assert comparison.ratio == 2.5
    assert comparison.ended_by == "target"
    assert comparison.sentence() == (
        "This run reached a held-out accuracy of 0.450 after 2,000 rollouts, plain GRPO after 5,000: 2.5 times as many."
    )


@pytest.mark.parametrize(("ended_by", "why"), [("rollouts", ""), ("time", " (its time was over)")])
def test_not_reached_is_said(ended_by, why):
    comparison = compare(RUN, history((0, 0.2), (6000, 0.449), (9000, 0.44)), rollouts=9216, ended_by=ended_by)
    assert comparison.baseline is None
    assert comparison.ratio is None
    assert comparison.ended_by == ended_by
    assert comparison.sentence() == (
        "This run reached a held-out accuracy of 0.450 after 2,000 rollouts; plain GRPO did not reach it within "
        f"9,216{why}: its best was 0.449."
    )


def test_a_better_baseline_is_said():
    comparison = compare(RUN, history((0, 0.2), (500, 0.6)), rollouts=500, ended_by="rollouts")
    assert comparison.ratio == 0.25
    assert comparison.sentence().endswith("plain GRPO after 500: this run needed 4.0 times as many.")


def test_a_tie_is_said():
    comparison = compare(RUN, history((0, 0.2), (2040, 0.5)), rollouts=2040, ended_by="rollouts")
    assert comparison.sentence().endswith("plain GRPO after 2,040: about as many.")


def test_a_comparison_is_plain_json():
    comparison = compare(RUN, history((0, 0.2), (4000, 0.5)), rollouts=4000, ended_by="rollouts")
    content = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert content["ratio"] == 2.0
    assert content["baseline"]["rollouts_generated"] == 4000
    assert content["sentence"] == comparison.sentence()


def test_the_budget_is_rounded_up_to_whole_steps():
    assert step_budget(1000, 512) == 2
    assert step_budget(1024, 512) == 2
    assert step_budget(1, 512) == 1
    assert step_budget(0, 512) == 1
