"""The summary of a run of 20 steps, as a run that has ended leaves it."""

from rollwise.evaluation.curve import Evaluation
from rollwise.records.summary import finish_summary, start_summary

TOTALS = {
    "rollouts_generated": 1000,
    "rollouts_trained": 600,
    "rollouts_pending": 50,
    "rollouts_wasted": 350,
    "rows_replayed": 300,
    "tokens_generated": 8000,
}
EVALUATIONS = [Evaluation(0, 0, 0.2, 1.0), Evaluation(10, 500, 0.5, 5.0), Evaluation(20, 1000, 0.4, 9.0)]


def finished(**changes):
    fields = {
        "status": "finished",
        "stop_reason": None,
        "steps": 20,
        "seconds": 72.0,
        "seconds_generation": 18.0,
        "seconds_rollwise": 0.72,
        "totals": TOTALS,
        "evaluations": EVALUATIONS,
    }
    return finish_summary(start_summary({"learning_rate": 1e-4}, seed=7), **(fields | changes))
