"""From samples to figures, as plain values for JSON. Numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollwise.evaluation.efficiency import aes
from rollwise.evaluation.measures import (
    Figure,
    avg_at_k,
    mean_lengths,
    mean_over_benchmarks,
    mean_pass_at_k,
    pass_at_k,
)
from rollwise.evaluation.verify import RIGHT, UNSCORED

Rows = Sequence[Mapping[str, Any]]


def counts_by_problem(rows: Rows) -> dict[str, tuple[int, int]]:
    """Return (n_i, c_i), the scored and the right samples, of each problem that has samples."""
    counts: dict[str, tuple[int, int]] = {}
    for row in rows:
        n, c = counts.get(row["problem_id"], (0, 0))
        counts[row["problem_id"]] = (n + (row["verdict"] != UNSCORED), c + (row["verdict"] == RIGHT))
    return counts


def benchmark_results(
    rows: Rows, ks: Sequence[int], num_problems: int, levels: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the figures of one benchmark.

    Args:
        rows: Its samples, with `problem_id`, `verdict`, `tokens`, `finished` and `extracted`.
        ks: The k of pass@k.
        num_problems: All its problems, those without samples too.
        levels: Difficulty of each problem by its id; None where it is not known.

    Returns:
        Counts, shares in [0, 1], `avg`, `pass_at_k` by k (problems with fewer than k scored samples left out and
        counted), mean tokens of `all`, `right` and `wrong` samples, and `avg` by level where there are levels.
    """
    counts = counts_by_problem(rows)
    total = len(rows)
    by_level: dict[str, list[tuple[int, int]]] = {}
    for problem_id, count in counts.items():
        if (level := levels.get(problem_id)) is not None:
            by_level.setdefault(level, []).append(count)

    def share(count: int) -> float | None:
        return count / total if total else None

    is_right = [None if row["verdict"] == UNSCORED else row["verdict"] == RIGHT for row in rows]
    return {
        "problems": num_problems,
        "problems_done": len(counts),
        "samples": total,
        "samples_unscored": sum(verdict is None for verdict in is_right),
        "share_unscored": share(sum(verdict is None for verdict in is_right)),
        "share_without_answer": share(sum(row["extracted"] is None and row["verdict"] != UNSCORED for row in rows)),
        "share_cut_off": share(sum(not row["finished"] for row in rows)),
        "avg": plain(avg_at_k(counts.values())),
        "pass_at_k": {str(k): plain(mean_pass_at_k(counts.values(), k)) for k in ks},
        "problems_left_out": {str(k): sum(n < k for n, _ in counts.values()) for k in ks},
        "mean_tokens": mean_lengths([row["tokens"] for row in rows], is_right),
        "by_level": {level: plain(avg_at_k(found)) for level, found in sorted(by_level.items())},
    }


def mean_results(rows_by_benchmark: Sequence[Rows], ks: Sequence[int]) -> dict[str, Any]:
    """Return the unweighted means over benchmarks of `avg`, `pass_at_k`, `share_unscored` and `mean_tokens`."""
    counts = [list(counts_by_problem(rows).values()) for rows in rows_by_benchmark]

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None

    parts = [benchmark_results(rows, (), 0, {}) for rows in rows_by_benchmark]
    return {
        "avg": plain(mean_over_benchmarks([[c / n for n, c in found if n] for found in counts])),
        "pass_at_k": {
            str(k): plain(mean_over_benchmarks([[pass_at_k(n, c, k) for n, c in found if n >= k] for found in counts]))
            for k in ks
        },
        "share_unscored": mean([part["share_unscored"] for part in parts]),
        "mean_tokens": {
            name: mean([part["mean_tokens"][name] for part in parts]) for name in ("all", "right", "wrong")
        },
    }


def aes_results(results: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return the AES of one benchmark's results, or of the means, against a reference's of the same benchmark."""
    figures = (results["mean_tokens"]["all"], results["avg"], reference["mean_tokens"]["all"], reference["avg"])
    if any(figure is None for figure in figures):
        missing = {"value": None, "undefined_because": "a length or an accuracy is not known"}
        return missing | {"length_saving": None, "accuracy_gain": None}
    length, accuracy, reference_length, reference_accuracy = figures
    return asdict(aes(length, accuracy["value"], reference_length, reference_accuracy["value"]))


def plain(figure: Figure | None) -> dict[str, Any] | None:
    """Return a figure as JSON can hold it."""
    return None if figure is None else asdict(figure)
