"""The page: gathered values in, one HTML file out that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollwise._version import __version__
from rollwise.files import replacing
from rollwise.records.text import duration
from rollwise.report import figures
from rollwise.report.data import gather
from rollwise.report.figures import Figure, Series

REPORT = "report.html"
_AXIS_LABELS = {
    "rollouts": ("Rollouts", "rollouts generated"),
    "seconds": ("Seconds", "wall-clock seconds of training and evaluation"),
    "tokens": ("Tokens", "tokens generated"),
}
_FEW_DETAILS = 30
_TABLE_POINTS_OF_MANY_DETAILS = 4
#: What neither HTML nor a reader can do with: control characters but tab and newline, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def write_report(
    paths: Sequence[Path],
    output: Path,
    *,
    baseline: str | None = None,
    target: float | None = None,
    samples: bool = True,
) -> Path:
    """Gather what runs and studies measured and write the page, whole or not at all.

    Args:
        paths: Folders of runs and of studies.
        output: The file.
        baseline: The arm that the others are compared with; None takes the default of `gather`.
        target: Held-out accuracy that rollouts are counted to; None takes the default of `gather`.
        samples: Whether to show rollouts of checkpoints.

    Raises:
        UsageError: A folder is none of a run or a study, or there is no such arm.
    """
    page = render(gather(paths, baseline=baseline, target=target, samples=samples))
    with replacing(output) as partial:
        partial.write_text(page, encoding="utf-8")
    return output


def render(data: Mapping[str, Any], *, now: datetime | None = None) -> str:
    """Return the page of what `gather` found; all texts of runs are escaped.

    Args:
        data: What `gather` returned.
        now: When the page is made; the present by default.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files("rollwise.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    environment.filters |= {"number": figures.number, "duration": duration}
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    arms = [
        arm | {"style": figures.line_class(i), "is_baseline": arm["name"] == data["baseline"]}
        for i, arm in enumerate(data["arms"])
    ]
    page = template.render(
        data=data,
        arms=arms,
        has_interval=any(end["low"] is not None for end in data["ends"].values()),
        headline=_headline(data),
        accuracy=_accuracy(data),
        to_target=_to_target(data),
        waste=_waste(data),
        training=_training(data),
        details=_details(data),
        lengths=_lengths(data),
        version=__version__,
        made=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        css=Markup((folder / "page.css").read_text(encoding="utf-8")),
        js=Markup((folder / "page.js").read_text(encoding="utf-8")),
        svg=lambda figure: Markup(_UNPRINTABLE.sub("\ufffd", figure.svg)),
    )
    return page


def _printable(value: Any) -> Any:
    """Replace, in texts that come from runs, what a page cannot hold."""
    if isinstance(value, str) and _UNPRINTABLE.search(value):
        return type(value)(_UNPRINTABLE.sub("\ufffd", value))
    return value


def _estimate(figure: Mapping[str, Any] | None, digits: int = 3, scale: float = 1.0, unit: str = "") -> tuple[str, str]:
    """Write an estimate and its interval; a dash, or nothing, where there is none."""
    if figure is None:
        return "-", ""
    bound = {"=": "", ">=": "≥ ", "<=": "≤ ", "?": "? "}[figure.get("bound", "=")]

    def text(value: float) -> str:
        return f"{value * scale:,.{digits}f}"

    has_interval = figure["low"] is not None and figure["low"] < figure["high"]
    interval = f"{text(figure['low'])} to {text(figure['high'])}" if has_interval else ""
    return f"{bound}{text(figure['value'])}{unit}", interval


def _headline(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table on top: a row per arm that has runs with an end; a cell is a text and an interval."""
    summary = data["summary"]
    if summary is None:
        return None
    several, budgets = len(summary["arms"]) > 1, summary["budget_rollouts"]
    ends = {arm: found["accuracy"][-1] for arm, found in summary["arms"].items() if budgets}
    has_budget = several and any(end is None or end["value"] != data["ends"][arm]["value"] for arm, end in ends.items())
    has_ratio = several and summary["baseline"] in summary["arms"]
    columns = ["method", "runs", "accuracy at the end"]
    columns += [f"accuracy at {budgets[-1]:,} rollouts"] if has_budget else []
    columns += ["best accuracy"]
    if data["has_target"]:
        columns += [f"rollouts to {summary['target']:.3f}", "reached it"]
        columns += ["times fewer"] if has_ratio else []
    columns += ["rollouts generated", "useful share", "rows replayed", "seconds"]
    rows = []
    for arm in data["arms"]:
        name = arm["name"]
        found = summary["arms"].get(name)
        if found is None:
            continue
        runs = len(found["seeds"])
        cells = [(name, ""), (str(runs), ""), _estimate(data["ends"][name])]
        cells += [_estimate(found["accuracy"][-1])] if has_budget else []
        cells += [(f"{found['peak_mean']:.3f}", "")]
        if data["has_target"]:
            reached = f"{round(found['share_reached'] * runs)} of {runs}"
            cells += [_estimate(found["rollouts_to_target"], 0), (reached, "")]
            is_baseline = name == summary["baseline"]
            cells += [("1", "") if is_baseline else _estimate(found["rollouts_ratio"], 2)] if has_ratio else []
        cells += [
            _estimate(found["rollouts_generated"], 0),
            _estimate(found["share_trained"], 0, 100, "%"),
            _estimate(found["rows_replayed"], 0),
            _estimate(found["seconds"], 0),
        ]
        rows.append({"is_baseline": name == data["baseline"], "cells": cells})
    return {"columns": columns, "rows": rows}


def _styles(data: Mapping[str, Any]) -> dict[str, int]:
    return {arm["name"]: i for i, arm in enumerate(data["arms"])}


def _arm_series(data: Mapping[str, Any], curves: Mapping[str, Mapping[str, Any]]) -> list[Series]:
    """Lines of arms, in the arms' order and colours; those not in colour at first are `off`."""
    styles = _styles(data)
    lit = {arm["name"]: arm["lit"] for arm in data["arms"]}
    return [
        Series(
            arm,
            curve["x"],
            curve["y"],
            curve.get("low", ()),
            curve.get("high", ()),
            style=styles[arm],
            arm=styles[arm],
            going=curve.get("going", False),
            classes="" if lit[arm] else "off",
        )
        for arm, curve in curves.items()
    ]


def _accuracy(data: Mapping[str, Any]) -> list[tuple[str, Figure]]:
    """Held-out accuracy along each axis that was logged."""
    found = []
    for axis, curves in data["curves"].items():
        name, label = _AXIS_LABELS[axis]
        several = any(curve["low"] for curve in curves.values())
        text = "Mean over each method's runs" + (", with its 95% bootstrap interval" if several else "")
        text += ", linear between evaluations." if several else "; dots are evaluations."
        if any(curve["going"] for curve in curves.values()):
            text += " Dotted: runs that are still going."
        figure = figures.line_chart(
            f"accuracy-{axis}",
            f"Held-out accuracy against {label}",
            text,
            _arm_series(data, curves),
            x_label=label,
            y_label="held-out accuracy",
            target=data["summary"]["target"] if data["has_target"] else None,
            height=400,
            dots=True,
        )
        found.append((name, figure))
    return found


def _to_target(data: Mapping[str, Any]) -> Figure | None:
    summary = data["summary"]
    if not data["has_target"]:
        return None
    rows = []
    for arm in data["arms"]:
        found = summary["arms"].get(arm["name"])
        if found is None:
            continue
        estimate, ratio, runs = found["rollouts_to_target"], found["rollouts_ratio"], len(found["seeds"])
        reached = round(found["share_reached"] * runs)
        note = f"{'≥ ' if reached < runs else ''}{estimate['value']:,.0f}"
        if ratio is not None:
            sign = {"=": "", ">=": "≥ ", "<=": "≤ ", "?": "? "}[ratio["bound"]]
            note += f", {sign}{ratio['value']:.2f}x"
        note += f", {reached} of {runs} got there" if reached < runs else ""
        rows.append(
            {key: estimate[key] for key in ("value", "low", "high")}
            | {"name": arm["name"], "note": note, "is_bound": reached < runs}
            | {"is_base": arm["name"] == data["baseline"]}
        )
    text = f"Rollouts generated before the first evaluation at or above {summary['target']:.3f}"
    text += ", the smallest of the arms' peak means" if summary["target_is_default"] else ""
    text += f"; x: {data['baseline']}'s rollouts over the arm's." if data["baseline"] else "."
    if any(row["is_bound"] for row in rows):
        text += " Hatched: some runs never got there and count as all they generated, so the bar is a lower bound."
    title = f"Rollouts to a held-out accuracy of {summary['target']:.3f}"
    return figures.bars("to-target", title, text, rows, x_label="rollouts generated")


def _waste(data: Mapping[str, Any]) -> Figure | None:
    if not data["waste"]:
        return None
    text = (
        "Every generated rollout, by what became of it; mean over runs. Only those trained on reached a gradient. "
        "Replayed rows cost no generation and are drawn apart."
    )
    return figures.stacked_bars("waste", "Where the rollouts went", text, data["waste"])


def _training(data: Mapping[str, Any]) -> list[tuple[str, Figure]]:
    return [
        (
            curves["title"],
            figures.line_chart(
                f"training-{number}",
                f"{curves['title']} over the steps",
                "Mean over each method's runs, and over steps next to each other where they are many.",
                _arm_series(data, curves["arms"]),
                x_label="step",
                y_label=curves["label"],
                height=300,
            ),
        )
        for number, curves in enumerate(data["training"])
    ]


def _details(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Figures of one arm at a time."""
    maps = [found["ess"] for found in data["details"].values() if found["ess"]]
    values = [value for found in maps for row in found["rows"].values() for value in row if value is not None]
    lowest = min(values, default=1.0)
    low = max(0.0, min(0.9, int(lowest * 10) / 10))
    points = figures.TABLE_POINTS if len(data["details"]) <= _FEW_DETAILS else _TABLE_POINTS_OF_MANY_DETAILS
    details = []
    for number, (arm, found) in enumerate(data["details"].items()):
        drawn = []
        if found["waste"]:
            drawn.append(
                figures.stacked_steps(
                    f"detail-{number}-waste",
                    "Where the rollouts went, step by step",
                    "By the step they were generated in, per run; the line: rows replayed in that step.",
                    found["waste"],
                    table_points=points,
                )
            )
        if found["pool"]:
            epoch = found["epoch_end"]
            drawn.append(
                figures.line_chart(
                    f"detail-{number}-pool",
                    "Life of the prompt pool",
                    "Prompts that may still be drawn, and those that have retired"
                    + (f"; whole passes over the pool by the end: {epoch:,.3g}." if epoch is not None else "."),
                    _lines(found["pool"]),
                    x_label="step",
                    y_label="prompts",
                    from_zero=True,
                    table_points=points,
                    height=240,
                    legend=True,
                )
            )
        if found["waiting"]:
            drawn.append(
                figures.line_chart(
                    f"detail-{number}-waiting",
                    "Survivors waiting",
                    "Prompts whose pilots disagreed, and that wait for the rest of their group.",
                    _lines(found["waiting"]),
                    x_label="step",
                    y_label="prompts",
                    from_zero=True,
                    table_points=points,
                    height=190,
                )
            )
        if found["ess"]:
            drawn.append(
                figures.heat_map(
                    f"detail-{number}-ess",
                    "How much rows still count, by age",
                    "Effective sample size per token of the rows of each age: 1 where the policy is still the one that "
                    "generated them, less the further it has moved. Blank: no rows of that age.",
                    found["ess"],
                    low=low,
                    table_points=points,
                )
            )
        if found["ages"]:
            drawn.append(
                figures.line_chart(
                    f"detail-{number}-ages",
                    "Age of the rows that replay drew",
                    "Optimizer steps between a row's generation and its use.",
                    _lines(found["ages"]),
                    x_label="step",
                    y_label="age, steps",
                    from_zero=True,
                    table_points=points,
                    height=240,
                    legend=True,
                )
            )
        details.append({"arm": arm, "figures": drawn, "is_first": False})
    if details:
        max(details, key=lambda detail: len(detail["figures"]))["is_first"] = True
    return details


def _lines(curves: Mapping[str, Mapping[str, Any]]) -> list[Series]:
    return [
        Series(name, curve["x"], curve["y"], style=i + figures.COLOURS * i)
        for i, (name, curve) in enumerate(curves.items())
    ]


def _lengths(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for number, (arm, lengths) in enumerate(data["lengths"].items()):
        figure = figures.line_chart(
            f"lengths-{number}",
            f"{arm}: lengths of right and wrong answers",
            f"Mean length by the step they were generated in; from {lengths['source']}.",
            _lines(lengths["lines"]),
            x_label="step",
            y_label=f"mean length, {lengths['unit']}",
            height=240,
            legend=True,
        )
        found.append({"arm": arm, "figure": figure, "table": lengths["table"], "unit": lengths["unit"]})
    return found
