"""Pictures of a simulation: success against rollouts, in the terminal and on a page that needs no network."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.text import Text

from rollwise.commands.simulate_tables import notes, tables
from rollwise.commands.study_tables import TextTable

_MARKS = "●▲■◆+*○△"
_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red", "white", "bright_black")
_HEIGHT = 14
#: Lines of the page, light and dark: distinct for most kinds of colour vision (after Okabe and Ito).
_COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#f59e42"),
    ("#008f68", "#35d0a2"),
    ("#b0478d", "#e59acb"),
    ("#6b5b00", "#f0e442"),
    ("#3f3f9f", "#a5a5f5"),
    ("#555555", "#bbbbbb"),
    ("#a11d33", "#ff8095"),
)
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "", "7 4", "2 3", "9 3 2 3")


def _ranges(summary: Mapping[str, Any]) -> tuple[float, float, float]:
    """The largest number of rollouts, the lowest and the highest success of the curves."""
    curves = [method["curve"] for method in summary["methods"].values()]
    most = max(max(curve["rollouts"]) for curve in curves) or 1.0
    low, high = min(min(curve["low"]) for curve in curves), max(max(curve["high"]) for curve in curves)
    if high - low < 1e-3:
        low, high = low - 0.01, high + 0.01
    return most, low, high


def terminal_plot(summary: Mapping[str, Any], *, width: int = 80) -> Text:
    """Draw the mean success over seeds against the rollouts generated."""
    most, low, high = _ranges(summary)
    columns = max(20, width - 10)
    cells: dict[tuple[int, int], int] = {}
    for number, method in enumerate(summary["methods"].values()):
        curve = method["curve"]
        xs = np.arange(columns) * most / (columns - 1)
        for column, x in enumerate(xs):
            if x > max(curve["rollouts"]) * (1 + 1e-9):
                continue
            value = float(np.interp(x, curve["rollouts"], curve["mean"]))
            cells.setdefault((round((value - low) / (high - low) * (_HEIGHT - 1)), column), number)
    text = Text("mean success of the pool\n", style="dim")
    for row in reversed(range(_HEIGHT)):
        is_labelled = row in (0, _HEIGHT // 2, _HEIGHT - 1)
        label = f"{low + (high - low) * row / (_HEIGHT - 1):.3f}" if is_labelled else ""
        text.append(f"{label:>7} {'┤' if is_labelled else '│'}", style="dim")
        for column in range(columns):
            found = cells.get((row, column))
            if found is None:
                text.append(" ")
            else:
                text.append(_MARKS[found % len(_MARKS)], style=_STYLES[found % len(_STYLES)])
        text.append("\n")
    text.append(" " * 8 + "└" + "─" * columns + "\n", style="dim")
    end = f"{most:,.0f} rollouts"
    text.append(" " * 9 + "0" + " " * max(1, columns - 1 - len(end)) + end + "\n", style="dim")
    for number, name in enumerate(summary["methods"]):
        text.append(f"  {_MARKS[number % len(_MARKS)]} {name}", style=_STYLES[number % len(_STYLES)])
    return text


def svg(summary: Mapping[str, Any], *, width: int = 860, height: int = 440) -> str:
    """Draw the curves as an SVG picture; classes `line-N`, `axis` and `text` are coloured by the page."""
    most, low, high = _ranges(summary)
    left, right, top, bottom = 62, 20, 18, 74
    plot_width, plot_height = width - left - right, height - top - bottom

    def x(value: float) -> float:
        return left + plot_width * value / most

    def y(value: float) -> float:
        return top + plot_height * (high - value) / (high - low)

    def points(xs: Sequence[float], ys: Sequence[float]) -> str:
        return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))

    parts = [""]  # the opening tag, once the height of the legend is known
    parts.append('<title id="svg-title">Mean success of the pool against rollouts generated</title>')
    ends = ", ".join(f"{name} {m['success_end']['value']:.3f}" for name, m in summary["methods"].items())
    parts.append(f'<desc id="svg-desc">Mean success at the end of the runs: {html.escape(ends)}.</desc>')
    for tick in _ticks(low, high):
        parts.append(f'<path class="grid" d="M{left} {y(tick):.1f}H{width - right}"/>')
        parts.append(f'<text class="text" x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
    for tick in _ticks(0, most):
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {top + plot_height}v5"/>')
        label = (
            f'<text class="text" x="{x(tick):.1f}" y="{top + plot_height + 20}" text-anchor="middle">{_si(tick)}</text>'
        )
        parts.append(label)
    parts.append(f'<path class="axis" d="M{left} {top}V{top + plot_height}H{width - right}"/>')
    middle = left + plot_width / 2
    parts.append(
        f'<text class="text" x="{middle}" y="{top + plot_height + 40}" text-anchor="middle">rollouts generated</text>'
    )
    if low <= summary["target"] <= high:
        parts.append(f'<path class="target" d="M{left} {y(summary["target"]):.1f}H{width - right}"/>')
        parts.append(f'<text class="text" x="{left + 6}" y="{y(summary["target"]) - 5:.1f}">target</text>')
    legend_x, legend_y = float(left), height - 8
    for number, (name, method) in enumerate(summary["methods"].items()):
        kind, curve = number % len(_COLOURS), method["curve"]
        dash = f' stroke-dasharray="{_DASHES[kind]}"' if _DASHES[kind] else ""
        band = points(curve["rollouts"] + curve["rollouts"][::-1], curve["high"] + curve["low"][::-1])
        parts.append(f'<polygon class="band-{kind}" points="{band}"/>')
        parts.append(f'<polyline class="line-{kind}"{dash} points="{points(curve["rollouts"], curve["mean"])}"/>')
        entry_width = 52 + 7.5 * len(name)
        if legend_x > left and legend_x + entry_width > width:
            legend_x, legend_y = float(left), legend_y + 22
        parts.append(f'<path class="line-{kind}"{dash} d="M{legend_x:.0f} {legend_y - 4}h26"/>')
        parts.append(f'<text class="text" x="{legend_x + 32:.0f}" y="{legend_y}">{html.escape(name)}</text>')
        legend_x += entry_width
    parts[0] = f'<svg viewBox="0 0 {width} {legend_y + 8}" role="img" aria-labelledby="svg-title svg-desc">'
    return "\n".join([*parts, "</svg>"])


def html_page(summary: Mapping[str, Any]) -> str:
    """Write a page with the picture, the tables and the notes: one file, no network, light or dark as the reader's."""
    light, dark = (
        "".join(f".line-{i}{{stroke:{pair[shade]}}}.band-{i}{{fill:{pair[shade]}}}" for i, pair in enumerate(_COLOURS))
        for shade in (0, 1)
    )
    body = "\n".join(_html_table(table) for table in tables(summary))
    remarks = "\n".join(f"<li>{html.escape(note)}</li>" for note in notes(summary))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rollwise simulate</title>
<style>
:root{{color-scheme:light dark;--ink:#1f2328;--dim:#57606a;--rule:#d8dee4;--page:#fff}}
{light}
@media (prefers-color-scheme:dark){{:root{{--ink:#e6edf3;--dim:#9ea7b1;--rule:#30363d;--page:#0d1117}}{dark}}}
body{{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:60rem;margin:2rem auto;
padding:0 1rem}}
svg{{width:100%;height:auto}}
[class^=line-]{{fill:none;stroke-width:2.2}}
[class^=band-]{{opacity:.16}}
.axis,.grid,.target{{fill:none;stroke:var(--dim)}}
.grid{{stroke:var(--rule)}}
.target{{stroke-dasharray:4 4}}
.text{{font-size:13px;fill:var(--dim)}}
.wide{{overflow-x:auto}}
table{{border-collapse:collapse;margin:1.2rem 0}}
caption{{text-align:left;font-weight:600;padding-bottom:.3rem}}
th,td{{white-space:nowrap;border-bottom:1px solid var(--rule);padding:.25rem .7rem;text-align:right;
font-variant-numeric:tabular-nums}}
th:first-child,td:first-child{{text-align:left}}
li{{color:var(--dim)}}
</style>
</head>
<body>
<h1>Success against rollouts, simulated</h1>
<p>A policy without a model: one skill for all prompts, which rises with the groups that are trained on. Lines are means
over seeds, bands the lowest and highest seed.</p>
{svg(summary)}
{body}
<ul>
{remarks}
</ul>
</body>
</html>
"""


def _html_table(table: TextTable) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [row(table.columns, "th"), *(row(cells, "td") for cells in table.rows)]
    return (
        f'<div class="wide"><table><caption>{html.escape(table.title)}</caption>\n'
        + "\n".join(lines)
        + "</table></div>"
    )


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two bounds, at most `most` of them."""
    rough = (high - low) / (most - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _si(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
