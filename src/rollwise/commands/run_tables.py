"""The tables that the terminal shows at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from rollwise.commands.baseline import Comparison
from rollwise.records.text import duration, share


def summary_table(summary: Mapping[str, Any], name: str) -> Table:
    """Draw what a run achieved and what it cost."""
    table = Table(title=f"{name}: {summary['steps']} steps in {duration(summary['seconds'])}", title_justify="left")
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    first, last = summary["heldout_accuracy_start"], summary["heldout_accuracy_end"]
    if last is not None:
        since = "not measured before training" if first is None else f"from {first:.3f} ({last - first:+.3f})"
        table.add_row("held-out accuracy", f"[bold green]{last:.3f}[/]", since)
    if summary["stop_reason"]:
        table.add_row("ended early", "", summary["stop_reason"])
    generated = summary["rollouts_generated"]
    table.add_row("rollouts generated", f"[bold]{generated:,}[/]", f"{summary.get('tokens_generated', 0):,} tokens")
    for key, text in (("trained", "reached a gradient"), ("wasted", "did not"), ("pending", "wait for more")):
        number = summary.get(f"rollouts_{key}", 0)
        if number or key != "pending":
            table.add_row(f"  {key}", f"{number:,}", f"{share(number, generated)} {text}")
    table.add_row("rows replayed", f"{summary['rows_replayed']:,}", "trained on again, at no generation")
    seconds = summary["seconds"]
    table.add_row(
        "seconds",
        f"{seconds:,.0f}",
        f"generation {share(summary['seconds_generation'], seconds)}, "
        f"Rollwise itself {share(summary['seconds_rollwise'], seconds)}",
    )
    return table


def comparison_table(comparison: Comparison, run: Mapping[str, Any], baseline: Mapping[str, Any]) -> Table:
    """Draw a run and plain GRPO side by side."""
    table = Table(title="One run each, one seed", title_justify="left")
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("this run", justify="right")
    table.add_column("plain GRPO", justify="right")

    def row(label: str, mine: str, theirs: str) -> None:
        table.add_row(label, mine, theirs)

    for moment in ("start", "end"):
        found = (summary[f"heldout_accuracy_{moment}"] for summary in (run, baseline))
        row(f"held-out accuracy, {moment}", *("-" if value is None else f"{value:.3f}" for value in found))
    theirs = comparison.baseline
    row(
        f"rollouts to {comparison.target:.3f}",
        f"[bold]{comparison.run.rollouts_generated:,}[/]",
        f"[bold]{theirs.rollouts_generated:,}[/]" if theirs else f"not within {comparison.baseline_rollouts:,}",
    )
    row(
        f"seconds to {comparison.target:.3f}",
        f"{comparison.run.seconds:,.0f}",
        f"{theirs.seconds:,.0f}" if theirs else f"not within {baseline['seconds']:,.0f}",
    )
    row("rollouts generated", f"{run['rollouts_generated']:,}", f"{baseline['rollouts_generated']:,}")
    row("rows replayed", f"{run['rows_replayed']:,}", f"{baseline['rows_replayed']:,}")
    return table
