"""What `rollwise evaluate` prints of its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwise.commands.study_tables import TextTable


def evaluation_tables(summary: Mapping[str, Any]) -> list[TextTable]:
    """Make the tables of a summary: each benchmark and their mean, then AES where there is a reference."""
    results, mean = summary["benchmarks"], summary["mean"]
    ks = [k for k in mean["pass_at_k"] if k != "1"]  # pass@1 is avg
    rows = []
    for name, found in results.items():
        lengths = found["mean_tokens"]
        rows.append(
            [
                name,
                f"{found['problems_done']:,} x {found['samples_per_problem']}",
                _cell(found["avg"]),
                *(_cell(found["pass_at_k"][k]) for k in ks),
                _percent(found["share_unscored"]),
                f"{_number(lengths['right'])} / {_number(lengths['wrong'])}",
            ]
        )
    if len(results) > 1:
        lengths = mean["mean_tokens"]
        rows.append(
            [
                "mean",
                "",
                _cell(mean["avg"]),
                *(_cell(mean["pass_at_k"][k]) for k in ks),
                _percent(mean["share_unscored"]),
                f"{_number(lengths['right'])} / {_number(lengths['wrong'])}",
            ]
        )
    columns = ["benchmark", "problems", "avg", *(f"pass@{k}" for k in ks), "unscored", "tokens right / wrong"]
    tables = [TextTable(f"{summary['model']}, mean over problems [95% interval]", columns, rows)]
    if "aes" in summary:
        compared = summary["aes"]["benchmarks"] | ({"mean": summary["aes"]["mean"]} if summary["aes"]["mean"] else {})
        lines = [
            [name, _signed(found["value"]), _signed(found["length_saving"]), _signed(found["accuracy_gain"])]
            for name, found in compared.items()
        ]
        title = f"AES against {summary['aes']['reference']}"
        tables.append(TextTable(title, ["benchmark", "AES", "shorter by", "more accurate by"], lines))
    return tables


def evaluation_notes(summary: Mapping[str, Any]) -> list[str]:
    """Say what a reader of the tables must know: what was left out, unscored, cut off or undefined."""
    found = [f"intervals: {summary['interval']}"]
    for name, results in summary["benchmarks"].items():
        if results["problems_done"] < results["problems"]:
            found.append(f"{name}: only {results['problems_done']} of {results['problems']} problems are done")
        if results["samples_unscored"]:
            found.append(
                f"{name}: {results['samples_unscored']:,} samples could not be scored and count neither as right nor "
                f"as wrong; column reason of its samples says why"
            )
        for k, left_out in results["problems_left_out"].items():
            if left_out:
                plural = "s" if left_out > 1 else ""
                found.append(
                    f"{name}: pass@{k} leaves out {left_out} problem{plural} with fewer than {k} scored samples"
                )
        if results["share_cut_off"]:
            found.append(f"{name}: {results['share_cut_off']:.0%} of the samples were cut off at max_tokens")
    for name, aes in summary.get("aes", {}).get("benchmarks", {}).items():
        if aes["value"] is None:
            found.append(f"{name}: AES is undefined, for {aes['undefined_because']}")
    return found


def _cell(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "-"
    if figure["low"] is None:
        return f"{figure['value']:.3f}"
    return f"{figure['value']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _signed(value: float | None) -> str:
    return "undefined" if value is None else f"{value:+.3f}"
