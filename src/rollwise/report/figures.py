"""Charts as SVG text, drawn by hand so that a page of a hundred runs stays small.

Colours come from the page's style sheet, by class: `k0` to `k7` lines, `o-<outcome>` parts, `h0` to `h9` levels of a
heat map. Values under the pointer are read back by the page's script from the paths and from `data-` attributes. Every
chart has a title, a description and a table of its values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any

from rollwise.report.curves import thin

#: Colours of lines; further arms take them again with other dashes.
COLOURS = 8
#: Levels of the heat map.
LEVELS = 10

_WIDTH = 760
#: Points of a line in the table of values, at most.
TABLE_POINTS = 12
_TABLE_POINTS_OF_MANY = 6
_MANY = 12
_MOST_DOTS = 30
_LABEL_CHARACTERS = 27

#: Outcomes as a reader should see them, in the order in which they are drawn.
OUTCOME_LABELS = {
    "trained": "trained on",
    "pending": "waiting",
    "zero_variance": "zero variance",
    "solved": "solved",
    "too_easy": "too easy",
    "too_hard": "too hard",
    "aged_out": "aged out",
    "surplus": "surplus",
    "downsampled": "downsampled",
    "unscored": "unscored",
    "truncated": "truncated",
    "padding": "padding",
    "wasted": "not trained on",
}


@dataclass(frozen=True)
class Figure:
    """A chart and what goes with it.

    Attributes:
        id: Its id on the page.
        title: What it shows, in a few words.
        text: What it shows, in a sentence.
        svg: The drawing.
        columns: Head of the table of its values.
        rows: The table.
        legend: Pairs of a class and a text; empty where the page's legend of arms applies.
    """

    id: str
    title: str
    text: str
    svg: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Series:
    """A line: its points, the interval around them if there is one, and the arm it belongs to."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: int = 0
    arm: int | None = None
    going: bool = False
    classes: str = field(default="")


def number(value: float, digits: int = 3) -> str:
    """Write a number for a reader: whole ones with commas, small ones with some digits."""
    if abs(value - round(value)) < 1e-9 or abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.{digits}f}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two bounds, at most `most` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Short labels with one unit and one number of decimals for all."""
    largest = max((abs(value) for value in values), default=0.0)
    size, unit = next(((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if largest >= s), (1.0, ""))
    size = 1e3 if unit == "k" else size
    scaled = [value / size for value in values]
    digits = next((d for d in range(6) if all(abs(v - round(v, d)) < 1e-6 for v in scaled)), 6)
    return [f"{v:,.{digits}f}{unit}" if v else "0" for v in scaled]


def line_chart(
    id: str,
    title: str,
    text: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    from_zero: bool = False,
    target: float | None = None,
    height: int = 340,
    legend: bool = False,
    dots: bool = False,
    table_points: int | None = None,
) -> Figure:
    """Draw lines with their intervals.

    Args:
        id: The figure's id.
        title: Its title.
        text: A sentence about it.
        series: The lines.
        x_label: What the x axis measures.
        y_label: What the y axis measures, with its unit.
        from_zero: Whether the y axis begins at 0.
        target: A value of y to mark.
        height: Height of the drawing.
        legend: Whether the figure has a legend of its own.
        dots: Whether to mark the points, where a line has few.
        table_points: Points of a line in the table of values, at most.
    """
    left, right, top, bottom = 66, 18, 14, 48
    width, plot = _WIDTH - left - right, height - top - bottom
    x0, x1 = min(min(s.x) for s in series), max(max(s.x) for s in series)
    x0 = 0.0 if x0 < 0.3 * x1 else x0
    x1 = x1 if x1 > x0 else x0 + 1
    marks = [] if target is None else [target]
    lows = [*(v for s in series for v in (s.low or s.y)), *marks]
    highs = [*(v for s in series for v in (s.high or s.y)), *marks]
    y0, y1 = min(lows), max(highs)
    pad = 0.06 * (y1 - y0) or abs(y1) * 0.05 or 0.5
    y0, y1 = (0.0 if from_zero and y0 >= 0 else y0 - pad), y1 + pad

    def px(x: float, y: float) -> str:
        return f"{_short(left + width * (x - x0) / (x1 - x0))} {_short(top + plot * (y1 - y) / (y1 - y0))}"

    parts = [_axes(left, top, width, plot, (x0, x1), (y0, y1), x_label, y_label)]
    if target is not None:
        y = px(x0, target).split()[1]
        parts.append(f'<path class="target" d="M{left} {y}h{width}"/>')
        parts.append(f'<text class="note" x="{left + 6}" y="{float(y) - 5:.1f}">target {target:.3f}</text>')
    for s in reversed(series):  # the first, the baseline, on top
        points = [px(x, y) for x, y in zip(s.x, s.y, strict=True)]
        inner = ""
        if s.low:
            there = [px(x, y) for x, y in zip(s.x, s.high, strict=True)]
            back = [px(x, y) for x, y in zip(reversed(s.x), reversed(s.low), strict=True)]
            inner += f'<path class="band" d="M{"L".join(there + back)}Z"/>'
        inner += f'<path class="line" d="M{"L".join(points)}"/>'
        if dots and len(points) <= _MOST_DOTS:
            inner += '<path class="dot" d="' + "".join(f"M{p}h0" for p in points) + '"/>'
        arm = "" if s.arm is None else f' data-arm="{s.arm}"'
        name = escape(s.name + (" (still going)" if s.going else ""))
        classes = " ".join(["s", line_class(s.style), *(["going"] if s.going else []), *s.classes.split()])
        parts.append(f'<g class="{classes}"{arm} data-name="{name}">{inner}</g>')
    data = (
        f'data-kind="lines" data-box="{left} {top} {width} {plot}" '
        f'data-range="{x0:.8g} {x1:.8g} {y0:.8g} {y1:.8g}" data-x="{escape(x_label)}"'
    )
    per_series = table_points or (TABLE_POINTS if len(series) <= _MANY else _TABLE_POINTS_OF_MANY)
    has_band = any(s.low for s in series)
    rows = [
        [s.name, number(s.x[i]), number(s.y[i])]
        + ([f"{number(s.low[i])} to {number(s.high[i])}" if s.low else "-"] if has_band else [])
        for s in series
        for i in thin(range(len(s.x)), per_series)
    ]
    columns = ["line", x_label, y_label, *(["95% interval"] if has_band else [])]
    keys = [(f"s {line_class(s.style)}", s.name) for s in series] if legend else []
    return Figure(id, title, text, _svg(id, height, parts, data), columns, rows, keys)


def line_class(style: int) -> str:
    """Classes of the colour and of the dashes of a line."""
    return f"k{style % COLOURS} d{style // COLOURS % 4}"


def _axes(
    left: float,
    top: float,
    width: float,
    plot: float,
    x_range: tuple[float, float],
    y_range: tuple[float, float] | None,
    x_label: str,
    y_label: str,
    x_unit: str = "",
) -> str:
    """Draw grid, ticks, numbers and labels; without numbers on the y axis where it has no range."""
    (x0, x1), parts, grid, marks = x_range, [], "", ""  # one path for all lines of a kind: a page has many
    if y_range is not None:
        y0, y1 = y_range
        values = ticks(y0, y1, 6)
        for value, label in zip(values, tick_labels(values), strict=True):
            y = top + plot * (y1 - value) / (y1 - y0)
            grid += f"M{left} {_short(y)}h{width}"
            parts.append(f'<text class="end" x="{left - 8}" y="{_short(y + 4)}">{label}</text>')
    values = ticks(x0, x1, 7)
    for value, label in zip(values, tick_labels(values), strict=True):
        x = left + width * (value - x0) / (x1 - x0)
        if y_range is None:
            grid += f"M{_short(x)} {top}v{plot}"
        marks += f"M{_short(x)} {top + plot}v5"
        parts.append(f'<text class="mid" x="{_short(x)}" y="{top + plot + 19}">{label}{x_unit}</text>')
    parts.insert(0, f'<path class="grid" d="{grid}"/><path class="axis" d="M{left} {top}v{plot}h{width}{marks}"/>')
    parts.append(f'<text class="label mid" x="{left + width / 2:.0f}" y="{top + plot + 40}">{escape(x_label)}</text>')
    if y_label:
        middle = top + plot / 2
        parts.append(
            f'<text class="label mid" transform="rotate(-90 14 {middle:.0f})" x="14" y="{middle:.0f}">'
            f"{escape(y_label)}</text>"
        )
    return "".join(parts)


def bars(id: str, title: str, text: str, rows: Sequence[Mapping[str, Any]], *, x_label: str) -> Figure:
    """Draw horizontal bars with intervals; each row has `name`, `value`, `low`, `high`, `note`, `is_bound`, `is_base`.

    `note` is written behind the bar; a bound, which the true value lies beyond, is hatched.
    """
    left, right, top, bottom = 200, 16, 6, 46
    row_height = 26 if len(rows) <= 40 else 18
    plot = row_height * len(rows)
    most = max(max(row["value"], row["high"] or 0) for row in rows) * 1.0 or 1.0
    room = min(290, 14 + round(6.7 * max(len(row["note"]) for row in rows)))  # for the notes
    width = _WIDTH - left - right - room
    parts = [_axes(left, top, width, plot, (0, most), None, x_label, "")]
    for i, row in enumerate(rows):
        y, size = top + i * row_height, row_height - 8
        length = width * row["value"] / most
        tip = escape(f"{row['name']}: {row['note']}")
        kinds = " ".join(["bar", *(["base"] if row["is_base"] else []), *(["bound"] if row["is_bound"] else [])])
        parts.append(_row_name(row["name"], left, y + row_height / 2))
        parts.append(
            f'<rect class="{kinds}" x="{left}" y="{y + 4}" width="{_short(length)}" height="{size}" data-tip="{tip}"/>'
        )
        end = row["value"]
        if row["low"] is not None:
            a, b = (_short(left + width * row[key] / most) for key in ("low", "high"))
            middle = y + row_height / 2
            parts.append(f'<path class="whisker" d="M{a} {middle}H{b}M{a} {middle - 4}v8M{b} {middle - 4}v8"/>')
            end = max(end, row["high"])
        x = left + width * end / most + 7
        parts.append(
            f'<text class="note" x="{_short(x)}" y="{_short(y + row_height / 2 + 4)}">{escape(row["note"])}</text>'
        )
    table = [
        [
            row["name"],
            ("at least " if row["is_bound"] else "") + number(row["value"]),
            f"{number(row['low'])} to {number(row['high'])}" if row["low"] is not None else "-",
            row["note"],
        ]
        for row in rows
    ]
    svg = _svg(id, top + plot + bottom, parts, 'data-kind="tips"')
    return Figure(id, title, text, svg, ["method", x_label, "95% interval", "note"], table)


def stacked_bars(id: str, title: str, text: str, arms: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw what became of each arm's rollouts as shares, and its replayed rows as a thin bar below."""
    left, right, top, bottom = 200, 26, 6, 46
    row_height = 34 if len(arms) <= 40 else 24
    plot, width = row_height * len(arms), _WIDTH - left - right
    most = max(1.0, *(found["replayed"] / found["generated"] for found in arms.values()))
    parts = [_axes(left, top, width, plot, (0, 100 * most), None, "share of the rollouts generated", "", "%")]
    seen: dict[str, None] = {}
    rows = []
    for i, (arm, found) in enumerate(arms.items()):
        y, size, x = top + i * row_height, row_height - 16, float(left)
        parts.append(_row_name(arm, left, y + 4 + size / 2))
        for outcome, count in found["outcomes"].items():
            share = count / found["generated"]
            length = width * share / most
            label = OUTCOME_LABELS.get(outcome, outcome)
            tip = escape(f"{arm}: {count:,.0f} {label}, {share:.1%} of {found['generated']:,.0f} generated")
            seen[outcome] = None
            parts.append(
                f'<rect class="o {_outcome_class(outcome)}" x="{_short(x)}" y="{y + 3}" width="{_short(length)}" '
                f'height="{size}" data-tip="{tip}"/>'
            )
            if length > 34 and size > 14:
                parts.append(
                    f'<text class="in {_outcome_class(outcome)}" x="{_short(x + length / 2)}" '
                    f'y="{_short(y + 7 + size / 2)}">{share:.0%}</text>'
                )
            x += length
        replayed = found["replayed"] / found["generated"]
        if found["replayed"]:
            tip = escape(f"{arm}: {found['replayed']:,.0f} rows replayed, {replayed:.1%} of the rollouts generated")
            parts.append(
                f'<rect class="o o-replayed" x="{left}" y="{y + 4 + size}" width="{_short(width * replayed / most)}" '
                f'height="5" data-tip="{tip}"/>'
            )
        rows.append((arm, found))
    outcomes = [name for name in OUTCOME_LABELS if name in seen] + [name for name in seen if name not in OUTCOME_LABELS]
    has_replay = any(found["replayed"] for found in arms.values())
    legend = [(f"o {_outcome_class(name)}", OUTCOME_LABELS.get(name, name)) for name in outcomes]
    legend += [("o o-replayed", "replayed rows (thin bar)")] if has_replay else []
    columns = ["method", "generated", *(OUTCOME_LABELS.get(name, name) for name in outcomes), "rows replayed"]
    table = [
        [arm, number(found["generated"])]
        + [_count(found["outcomes"].get(name, 0), found["generated"]) for name in outcomes]
        + [number(found["replayed"])]
        for arm, found in rows
    ]
    svg = _svg(id, top + plot + bottom, parts, 'data-kind="tips"')
    return Figure(id, title, text, svg, columns, table, legend)


def _count(count: float, whole: float) -> str:
    return f"{count:,.0f} ({count / whole:.0%})" if count else "0"


def _outcome_class(outcome: str) -> str:
    return f"o-{outcome}" if outcome in OUTCOME_LABELS or outcome == "replayed" else "o-other"


def stacked_steps(
    id: str, title: str, text: str, found: Mapping[str, Any], *, table_points: int = TABLE_POINTS
) -> Figure:
    """Draw what became of the rollouts of each step, on top of each other, and replayed rows as a line."""
    left, right, top, bottom, height = 66, 18, 10, 48, 300
    width, plot = _WIDTH - left - right, height - top - bottom
    edges, outcomes, replayed = found["edges"], found["outcomes"], found["replayed"]
    totals = [sum(column) for column in zip(*outcomes.values(), strict=True)]
    most = max([*totals, *(replayed or [])]) * 1.04 or 1.0

    def x(step: float) -> str:
        return _short(left + width * (step - edges[0]) / (edges[-1] - edges[0]))

    def y(value: float) -> str:
        return _short(top + plot * (most - value) / most)

    parts = [_axes(left, top, width, plot, (edges[0], edges[-1]), (0, most), "step", "rollouts per step")]
    floor = [0.0] * len(totals)
    for name, values in outcomes.items():
        roof = [a + b for a, b in zip(floor, values, strict=True)]
        there = "".join(f"V{y(v)}H{x(edge)}" for v, edge in zip(roof, edges[1:], strict=True))
        back = "".join(f"V{y(v)}H{x(edge)}" for v, edge in zip(reversed(floor), reversed(edges[:-1]), strict=True))
        parts.append(f'<path class="o {_outcome_class(name)}" d="M{x(edges[0])} {y(floor[0])}{there}{back}Z"/>')
        floor = roof
    if replayed is not None:
        steps = "".join(f"V{y(v)}H{x(edge)}" for v, edge in zip(replayed, edges[1:], strict=True))
        parts.append(f'<path class="replayed-line" d="M{x(edges[0])} {y(replayed[0])}{steps}"/>')
    labels = {OUTCOME_LABELS.get(name, name): values for name, values in outcomes.items()}
    labels |= {"rows replayed": replayed} if replayed is not None else {}
    legend = [(f"o {_outcome_class(name)}", OUTCOME_LABELS.get(name, name)) for name in outcomes]
    legend += [("replayed-key", "rows replayed")] if replayed is not None else []
    data = f'data-kind="stack" data-box="{left} {top} {width} {plot}" {_grid_data(edges, labels)}'
    columns, rows = _grid_table("step", edges, labels, table_points)
    return Figure(id, title, text, _svg(id, height, parts, data), columns, rows, legend)


def heat_map(
    id: str,
    title: str,
    text: str,
    found: Mapping[str, Any],
    *,
    low: float,
    high: float = 1.0,
    table_points: int = TABLE_POINTS,
) -> Figure:
    """Draw the value of each row (age) over the steps, in levels of colour from `low` to `high`."""
    left, right, top, bottom = 66, 18, 6, 48
    ages, edges = found["rows"], found["edges"]
    row_height = 26
    width, plot = _WIDTH - left - right, row_height * len(ages)
    levels: list[list[str]] = [[] for _ in range(LEVELS)]

    def x(step: float) -> float:
        return float(left + width * (step - edges[0]) / (edges[-1] - edges[0]))

    parts = []
    for i, (age, values) in enumerate(reversed(ages.items())):
        y = top + i * row_height
        parts.append(f'<text class="end" x="{left - 8}" y="{y + row_height / 2 + 4}">{escape(age)}</text>')
        for value, (start, end) in zip(values, pairwise(edges), strict=True):
            if value is not None:
                level = min(LEVELS - 1, max(0, int((value - low) / (high - low) * LEVELS)))
                cell = f"M{_short(x(start))} {y}H{_short(x(end))}v{row_height - 1}H{_short(x(start))}z"
                levels[level].append(cell)
    for level, cells in enumerate(levels):
        if cells:
            parts.append(f'<path class="h{level}" d="{"".join(cells)}"/>')
    parts.append(_axes(left, top, width, plot, (edges[0], edges[-1]), None, "step", "age, steps").replace("grid", "no"))
    named = {f"age {age}": values for age, values in reversed(ages.items())}
    data = f'data-kind="heat" data-box="{left} {top} {width} {plot}" {_grid_data(edges, named)}'
    columns, rows = _grid_table("step", edges, named, table_points)
    legend = [(f"h{level}", _level(level, low, high)) for level in range(LEVELS)]
    svg = _svg(id, top + plot + bottom, parts, data)
    return Figure(id, title, text, svg, columns, rows, legend)


def _level(level: int, low: float, high: float) -> str:
    if level == 0:
        return f"{low:.2g}"
    return f"{high:.2g}" if level == LEVELS - 1 else ""


def _grid_data(edges: Sequence[int], rows: Mapping[str, Sequence[float | None]]) -> str:
    """Values for the page's script: numbers with commas, rows with semicolons."""
    values = ";".join(",".join("" if v is None else f"{v:g}" for v in row) for row in rows.values())
    return f'data-edges="{",".join(map(str, edges))}" data-rows="{escape("|".join(rows))}" data-values="{values}"'


def _grid_table(
    first: str, edges: Sequence[int], rows: Mapping[str, Sequence[float | None]], points: int
) -> tuple[list[str], list[list[str]]]:
    chosen = thin(range(len(edges) - 1), points)
    spans = [f"{edges[i]}" if edges[i + 1] - edges[i] == 1 else f"{edges[i]}-{edges[i + 1] - 1}" for i in chosen]
    table = [
        [span, *("-" if (value := row[i]) is None else number(value) for row in rows.values())]
        for span, i in zip(spans, chosen, strict=True)
    ]
    return [first, *rows], table


def _row_name(name: str, left: float, y: float) -> str:
    shown = name if len(name) <= _LABEL_CHARACTERS else name[: _LABEL_CHARACTERS - 1] + "…"
    return f'<text class="row end" x="{left - 8}" y="{_short(y + 4)}" data-tip="{escape(name)}">{escape(shown)}</text>'


def _svg(id: str, height: float, parts: Sequence[str], data: str) -> str:
    """Put a drawing together; its title and its description are the figure's caption on the page."""
    named = f'role="img" aria-labelledby="{id}-t" aria-describedby="{id}-d"'
    return f'<svg viewBox="0 0 {_WIDTH} {height}" {named} {data}>{"".join(parts)}</svg>'


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
