import io

import pytest
from rich.console import Console
from run_helpers import EVALUATIONS, finished

from rollwise.commands.baseline import compare
from rollwise.commands.run_tables import comparison_table, summary_table
from rollwise.evaluation.curve import Evaluation


def as_text(renderable):
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()


def test_the_table_holds_the_numbers():
    text = as_text(summary_table(finished(stop_reason="all prompts are solved"), "demo"))
    for words in (
        "demo: 20 steps in 1 min 12 s",
        "0.400",
        "from 0.200 (+0.200)",
        "1,000",
        "8,000 tokens",
        "60% reached a gradient",
        "35% did not",
        "5% wait for more",
        "300",
        "generation 25%, Rollwise itself 1%",
        "all prompts are solved",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        ([Evaluation(0, 0, 0.2, 1.0), Evaluation(30, 2500, 0.45, 30.0)], ["2,500", "30"]),
        ([Evaluation(0, 0, 0.2, 1.0), Evaluation(30, 3000, 0.3, 30.0)], ["not within 3,000", "not within 72"]),
    ],
)
def test_the_comparison_holds_the_numbers(baseline, words):
    comparison = compare(EVALUATIONS, baseline, rollouts=3000, ended_by="rollouts")
    text = as_text(comparison_table(comparison, finished(), finished(evaluations=baseline)))
    for word in ["rollouts to 0.400", "500", "plain GRPO", "One run each, one seed", *words]:
        assert word in text, word


def test_what_was_not_measured_before_training_has_no_gain():
    only_at_the_end = finished(evaluations=EVALUATIONS[-1:])
    assert only_at_the_end["heldout_accuracy_start"] is None
    assert "0.400 │ not measured before training" in as_text(summary_table(only_at_the_end, "demo"))
    assert "held-out" not in as_text(summary_table(finished(evaluations=[]), "demo"))
    comparison = compare(EVALUATIONS, EVALUATIONS, rollouts=3000, ended_by="target")
    text = as_text(comparison_table(comparison, only_at_the_end, finished()))
    assert "held-out accuracy, start │ - │ 0.200" in " ".join(text.split())
