"""The reward function of the runs in the tests."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "acc": right}


def always_right(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": 1.0, "acc": 1.0}


def sometimes_fails(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Fails in one way or another for about half of the answers."""
    kind = sum(map(ord, solution_str)) % 8
    if kind == 0:
        raise ValueError("no reward for this one")
    if kind in (1, 2):
        return {"score": [float("nan"), float("inf")][kind - 1], "acc": 0.0}
    if kind == 3:
        return {"score": None, "acc": 0.0}
    return compute_score(data_source, solution_str, ground_truth)


def always_fails(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    raise ValueError("this reward function is broken")
