"""Reward of a solution in mathematics: 1 if math-verify finds its answer equal to the right one, else 0.

verl calls `compute_score` in its reward workers. Needs math-verify (`pip install 'math-verify>=0.9,<0.10'`).
"""

from math_verify import parse, verify


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    # math-verify's own time limits need the main thread, which a reward worker's thread is not.
    answer = parse(solution_str, parsing_timeout=None)
    right = verify(parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None), answer, timeout_seconds=None)
    return {"score": float(right), "acc": float(right)}
