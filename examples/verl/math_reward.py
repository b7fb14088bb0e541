"""Reward of a solution in mathematics: 1 if math-verify finds its answer equal to the right one, else 0.

verl calls `compute_score` in its reward workers. Needs math-verify (`pip install 'math-verify>=0.9,<0.10'`). An answer
that cannot be compared within 10 s, such as 9^9^9, is an error: verl then leaves the rollout without a reward.
"""

from rollwise.evaluation.verify import MathVerifier

# Compares in a process of its own: math-verify's time limits work in main threads alone, and this is another one.
_verifier = MathVerifier(timeout_seconds=10)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    verdict = _verifier.verify(solution_str, ground_truth)
    if verdict.is_right is None:
        raise ValueError(f"no reward for {solution_str[-200:]!r}: {verdict.reason}")
    return {"score": float(verdict.is_right), "acc": float(verdict.is_right)}
