"""The tables of a study, for the terminal and, as Markdown, for a document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from rollwise.commands.cells import count, estimate, ratio

_NOTHING = "-"
_Figure = Mapping[str, Any] | None


_MOST_NAMED = 6  # missing runs


@dataclass(frozen=True)
class TextTable:
    """A table of texts, the first column of which names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> Table:
        """Draw it for a terminal."""
        table = Table(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left", style=None if i else "bold", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Write it in GitHub's Markdown."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return f"{self.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables(summary: Mapping[str, Any]) -> list[TextTable]:
    """Turn what `aggregate` returned into tables: accuracies, rollouts and seconds to the target, costs."""
    arms, baseline, target = summary["arms"], summary["baseline"], summary["target"]
    has_baseline = baseline in arms
    others = [arm for arm in arms if arm != baseline and has_baseline]
    num_seeds = {arm: len(found["seeds"]) for arm, found in arms.items()}

    accuracy = TextTable(
        "Held-out accuracy at equal generated rollouts, mean over seeds [95% interval]",
        ["arm", "seeds", *(f"{budget:,}" for budget in summary["budget_rollouts"])],
        [
            [arm, str(num_seeds[arm]), *(_cell(e, _accuracy, num_seeds[arm]) for e in found["accuracy"])]
            for arm, found in arms.items()
        ]
        + [
            [f"{arm} - {baseline}", "paired", *(_cell(e, _difference) for e in arms[arm]["accuracy_difference"])]
            for arm in others
        ],
    )
    at_rows = TextTable(
        "Held-out accuracy at equal training compute, in rows that gradient steps took, mean over seeds [95% interval]",
        ["arm", *(f"{rows:,}" for rows in summary["rows_trained"])],
        [
            [arm, *(_cell(e, _accuracy, num_seeds[arm]) for e in found["accuracy_at_rows_trained"])]
            for arm, found in arms.items()
        ]
        + [
            [f"{arm} - {baseline}", *(_cell(e, _difference) for e in arms[arm]["difference_at_rows_trained"])]
            for arm in others
        ],
    )
    to_target = TextTable(
        f"To a held-out accuracy of {target:.3f} ({summary['to_target']})"
        + (f"; x: {baseline}'s mean over the arm's, paired by seed" if has_baseline else ""),
        ["arm", "reached it", "rollouts", "x", "seconds", "x"],
        [
            [
                arm,
                f"{round(found['share_reached'] * num_seeds[arm])}/{num_seeds[arm]}",
                _cell(found["rollouts_to_target"], count),
                _cell(found["rollouts_ratio"], ratio),
                _cell(found["seconds_to_target"], count),
                _cell(found["seconds_ratio"], ratio),
            ]
            for arm, found in arms.items()
        ],
    )
    costs = TextTable(
        "Whole runs, mean over seeds [95% interval]; seconds of training and evaluation, as many runs at once as made",
        ["arm", "rollouts generated", "reached a gradient", "rows replayed", "seconds", "peak accuracy"],
        [
            [
                arm,
                _cell(found["rollouts_generated"], count),
                _cell(found["share_trained"], _percent),
                _cell(found["rows_replayed"], count),
                _cell(found["seconds"], count),
                _accuracy(found["peak_mean"]),
            ]
            for arm, found in arms.items()
        ],
    )
    equal_compute = [at_rows] if summary["rows_trained"] else []
    return [accuracy, *equal_compute, to_target, costs, *_held_out_tables(arms, others, num_seeds)]


def _held_out_tables(arms: Mapping[str, Any], others: Sequence[str], num_seeds: Mapping[str, int]) -> list[TextTable]:
    """What the last evaluations say beyond their mean accuracy, as far as it was logged."""
    logged = [
        name for name in next(iter(arms.values()))["held_out"] if all(name in a["held_out"] for a in arms.values())
    ]
    told_apart = [name for name in logged if name.startswith("accuracy/")]
    passes = [name for name in logged if name.startswith("pass@")]
    lengths = [name for name in ("tokens/right", "tokens/wrong") if name in logged]
    found = []
    if passes or lengths:
        found.append(
            TextTable(
                "At the last evaluation: pass@k, mean tokens of right and of wrong answers, and the "
                "Accuracy-Efficiency Score against the baseline's run of the same seed",
                ["arm", *passes, *(name.replace("/", ", ") for name in lengths), "AES"],
                [
                    [
                        arm,
                        *(_cell(figures["held_out"][name], _accuracy, num_seeds[arm]) for name in passes),
                        *(_cell(figures["held_out"][name], _tokens, num_seeds[arm]) for name in lengths),
                        _cell(figures["aes"], _difference),
                    ]
                    for arm, figures in arms.items()
                ],
            )
        )
    if told_apart:
        found.append(
            TextTable(
                "Held-out accuracy at the last evaluation, told apart; then what each arm differs by, paired by seed",
                ["arm", *(name.removeprefix("accuracy/") for name in told_apart)],
                [
                    [arm, *(_accuracy(figures["held_out"][name]["value"]) for name in told_apart)]
                    for arm, figures in arms.items()
                ]
                + [
                    [arm, *(_cell(arms[arm]["held_out_difference"][n], _difference) for n in told_apart)]
                    for arm in others
                ],
            )
        )
    return found


def notes(summary: Mapping[str, Any]) -> list[str]:
    """Say what a reader of the tables has to know."""
    found = [f"intervals: {summary['interval']}"]
    bounds = {
        figure["bound"]
        for arm in summary["arms"].values()
        for name in ("rollouts_to_target", "rollouts_ratio", "seconds_ratio")
        if (figure := arm[name]) is not None
    } - {"="}
    if bounds:
        found.append(
            "runs that never reached the target count as their whole budget: >= and <= mark what is therefore a bound"
            + (", ? what may lie on either side" if "?" in bounds else "")
        )
    if summary["target_is_default"]:
        found.append("target: the smallest of the arms' peak mean accuracies")
    if missing := summary["runs_missing"]:
        others = f" and {len(missing) - _MOST_NAMED} others" if len(missing) > _MOST_NAMED else ""
        found.append(f"{len(missing)} runs are missing: {', '.join(missing[:_MOST_NAMED])}{others}")
    if len(summary["sources"]) > 1:
        found.append(f"the runs were made with {len(summary['sources'])} different versions; summary.json lists them")
    return found


def _cell(figure: _Figure, number: Callable[[float], str], expected: int | None = None) -> str:
    """Write an estimate with its interval and, where not all seeds are in it, how many are."""
    if figure is None:
        return _NOTHING
    text = estimate(figure, number, interval=figure["low"] is not None and figure["low"] < figure["high"])
    if expected is not None and figure["num_seeds"] != expected:
        text += f" ({figure['num_seeds']} of {expected} seeds)"
    return text


def _accuracy(value: float) -> str:
    return f"{value:.3f}"


def _difference(value: float) -> str:
    return f"{value:+.3f}"


def _tokens(value: float) -> str:
    return f"{value:.1f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"
