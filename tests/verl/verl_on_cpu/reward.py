"""The reward function of the runs in the tests."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "acc": right}
