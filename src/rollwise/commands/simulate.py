"""`rollwise simulate`: what methods would cost and how fast they would learn, on a policy without a model."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from rollwise.commands.simulate_plot import html_page, terminal_plot
from rollwise.commands.simulate_tables import notes, tables
from rollwise.commands.view import is_live
from rollwise.files import replacing
from rollwise.records.summary import write_json
from rollwise.records.text import duration
from rollwise.simulation.compare import compare
from rollwise.simulation.jobs import Job, run_jobs
from rollwise.simulation.rates import zero_variance_share
from rollwise.simulation.spec import DEFAULT_PROMPTS, Simulation, read_simulation

_QUIET_SECONDS = 2.0
_SECONDS_BETWEEN_LINES = 10.0
_ROLLOUTS_WORTH_PROCESSES = 3_000_000


def simulate(
    path: Path | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    html: Path | None = None,
    json: Path | None = None,
    markdown: bool = False,
    processes: int | None = None,
    console: Console | None = None,
) -> None:
    """Simulate methods and print what they cost.

    Args:
        path: A YAML file with fields of `rollwise.simulation.spec.Simulation`; None: its defaults.
        overrides: Fields that override it.
        html: Also write a page with the picture and the tables to this file.
        json: Also write all figures to this file.
        markdown: Print Markdown tables, and no plot.
        processes: Runs at a time; by default 1 for short simulations and as many as cores for long ones.
        console: Where to print; stdout by default.

    Raises:
        UsageError: A file is missing or cannot be read.
        ConfigError: A field is unknown or wrong.
    """
    console = console or Console()
    simulation = read_simulation(path, overrides or {})
    rates = simulation.success_rates()
    prompts = simulation.prompts if simulation.prompts is not None or rates.is_pool else DEFAULT_PROMPTS
    pool = rates.sample(prompts, np.random.default_rng(0))
    allocations = simulation.allocations()
    jobs = [
        Job(allocation, pool, simulation.options(seed))
        for allocation in allocations.values()
        for seed in simulation.seeds
    ]
    if processes is None:
        processes = os.cpu_count() or 1 if _size(simulation) * len(jobs) > _ROLLOUTS_WORTH_PROCESSES else 1
    began = time.monotonic()
    with _Bar(console) as bar:
        runs = run_jobs(jobs, processes=processes, progress=bar.update)
    by_method = {
        method: runs[i * len(simulation.seeds) : (i + 1) * len(simulation.seeds)]
        for i, method in enumerate(allocations)
    }
    summary: dict[str, Any] = {
        "settings": asdict(simulation),
        "rates": rates.source,
        "prompts": len(pool),
        "zero_variance_share_start": zero_variance_share(pool, simulation.group_size),
        "seconds": round(time.monotonic() - began, 2),
        **compare(by_method, baseline=next(iter(allocations)), target=simulation.target),
    }
    for table in tables(summary):
        if markdown:
            console.file.write(table.markdown() + "\n")
        else:
            console.print(table.rich())
    if not markdown:
        console.print(terminal_plot(summary, width=min(console.width, 100)))
    for note in notes(summary):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_json(json, summary)
    if html is not None:
        with replacing(html) as partial:
            partial.write_text(html_page(summary), encoding="utf-8")
    for written in filter(None, (json, html)):
        console.print(f"wrote {written}", markup=False, highlight=False, soft_wrap=True)


def _size(simulation: Simulation) -> float:
    """About how many rollouts a run has."""
    budget = simulation.options(0)["budget_rollouts"]
    return budget or (simulation.steps or 0) * 2.0 * simulation.train_prompts * simulation.group_size


class _Bar:
    """Progress, once it takes longer than two seconds: a bar in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._next_line = self._began + _QUIET_SECONDS
        self._bar = Progress(
            TextColumn("simulating"),
            BarColumn(),
            TextColumn("{task.percentage:.0f}%"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1.0)
        self._is_live = is_live(console)
        self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            self._bar.stop()

    def update(self, share: float) -> None:
        """Say what share of the work is done."""
        now = time.monotonic()
        if now < self._next_line:
            return
        if self._is_live:
            if not self._is_shown:
                self._bar.start()
                self._is_shown = True
            self._next_line = now + 0.1
            self._bar.update(self._task, completed=share)
        else:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            left = f", about {duration((now - self._began) * (1 - share) / share)} left" if share > 0 else ""
            self._console.print(f"simulated {share:.0%}{left}", markup=False, highlight=False)
