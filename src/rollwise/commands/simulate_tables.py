"""The tables of a simulation, for the terminal, a document and a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rollwise.commands.cells import count, estimate, ratio
from rollwise.commands.study_tables import TextTable
from rollwise.ledger import OUTCOMES

_SMALLEST_SHARE = 0.005  # of an outcome that gets a column


def tables(summary: Mapping[str, Any]) -> list[TextTable]:
    """Turn what `compare` returned into tables: what a step costs and what becomes of it; the way to the target."""
    methods, baseline = summary["methods"], summary["baseline"]
    seeds = len(methods[baseline]["seeds"])
    shown = [
        outcome
        for outcome in OUTCOMES
        if any(
            (m["share_by_outcome"].get(outcome) or {"value": 0})["value"] >= _SMALLEST_SHARE for m in methods.values()
        )
    ]
    costs = TextTable(
        f"Rollouts a step and what becomes of them, {_of_seeds(seeds)}",
        ["method", "a step", *(_in_words(outcome) for outcome in shown)],
        [
            [
                method,
                _cell(found["rollouts_per_step"], count, interval=False),
                *(_cell(found["share_by_outcome"].get(outcome), _percent, interval=False) for outcome in shown),
            ]
            for method, found in methods.items()
        ],
    )
    way = TextTable(
        f"Rollouts to a mean success of {summary['target']:.3f}, {_of_seeds(seeds)}"
        + (" [95% interval]" if seeds > 1 else ""),
        ["method", "reached", "rollouts", "x", "steps", "epochs", "success", "ended by"],
        [
            [
                method,
                f"{round(found['share_reached'] * seeds)}/{seeds}",
                _cell(found["rollouts_to_target"], _short),
                _cell(found["rollouts_ratio"], ratio),
                _cell(found["steps"], count, interval=False),
                _cell(found["epochs"], _decimal, interval=False),
                _cell(found["success_end"], _rate, interval=False),
                ", ".join(f"{end} {n}/{seeds}" if n < seeds else end for end, n in Counter(found["ended"]).items()),
            ]
            for method, found in methods.items()
        ],
    )
    return [costs, way]


def notes(summary: Mapping[str, Any]) -> list[str]:
    """Say what a reader of the tables has to know."""
    methods, settings = summary["methods"], summary["settings"]
    found = [
        f"{summary['prompts']:,} prompts, {summary['rates']}; at the start {summary['zero_variance_share_start']:.0%} "
        f"of groups of {settings['group_size']} have equal rewards",
    ]
    if len(methods) > 1:
        found.append(
            f"x: {summary['baseline']}'s rollouts to the target over the method's; steps and after: whole runs"
        )
    if summary["target_is_default"]:
        found.append("target: the highest mean success that every run reached")
    if any(m["rollouts_to_target"]["bound"] != "=" for m in methods.values()):
        found.append("runs that never reached the target count as all they generated: >= and <= mark bounds, ? neither")
    if len(methods[summary["baseline"]]["seeds"]) > 1:
        found.append(f"intervals: {summary['interval']}; they say nothing about the model's assumptions")
    engines = sorted({engine for m in methods.values() for engine in m["engines"]})
    words = {"scheduler": "the real scheduler", "counted": "the real allocators, fed with counts of outcomes"}
    found.append(f"played by {' and by '.join(words[engine] for engine in engines)}, in {summary['seconds']:.1f} s")
    for method, figures in methods.items():
        found += [f"{method} ended: {reason}" for reason in figures["stop_reasons"]]
    return found


def _of_seeds(seeds: int) -> str:
    return f"mean over {seeds} seeds" if seeds > 1 else "one seed"


def _in_words(outcome: str) -> str:
    return {"trained": "gradient", "pending": "waiting"}.get(outcome, outcome.replace("_", " "))


def _cell(figure: Mapping[str, Any] | None, number: Callable[[float], str], *, interval: bool = True) -> str:
    if figure is None:
        return "-"
    says_more = figure["low"] is not None and number(figure["low"]) != number(figure["high"])
    return estimate(figure, number, interval=interval and says_more)


def _short(value: float) -> str:
    """Write three digits: 984k, 1.66M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}" if value < 999.5 * size else f"{value / size:,.0f}{unit}"
    return f"{value:.0f}"


def _decimal(value: float) -> str:
    return f"{value:,.1f}" if value else "-"  # no epochs: the allocation draws as it likes


def _rate(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"
