"""Reward of an answer to a question: 1 if what stands in <answer>...</answer> is one of the right ones, else 0."""

import re
import string

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def _normalized(text):
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    answers = re.findall(r"<answer>(.*?)</answer>", solution_str, flags=re.DOTALL)
    right = [ground_truth] if isinstance(ground_truth, str) else list(ground_truth)
    found = bool(answers) and _normalized(answers[-1]) in {_normalized(answer) for answer in right}
    return {"score": float(found), "acc": float(found)}
