"""The progress display of a run: a live panel in a terminal, one line every few seconds elsewhere.

`ProgressView` only draws what it is told; `callbacks.RunCallback` tells it what the trainer logs. Nothing here
imports torch, so the view is up while the libraries are still loading.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rollwise.records.text import duration, share

_BARS = "▁▂▃▄▅▆▇█"
_REFRESHES_PER_SECOND = 4
_PANEL_WIDTH = 100
_ROOM_FOR_CTRL_C = 3  # its echo must not wrap to a line that the panel does not know of


def sparkline(values: list[float], width: int = 24) -> str:
    """Draw the last `width` values, if there are two, between their smallest and largest as bars of eight heights."""
    recent = values[-width:]
    if len(recent) < 2:
        return ""
    low, high = min(recent), max(recent)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in recent)


def is_live(console: Console) -> bool:
    """Tell whether what is drawn can be redrawn: in a terminal, and not in CI."""
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")


def live_panel(console: Console, render: Callable[[], RenderableType]) -> Live | None:
    """Return a panel that redraws itself; None, for plain lines, where there is no terminal or `CI` is set."""
    if not is_live(console):
        return None
    return Live(get_renderable=render, console=console, refresh_per_second=_REFRESHES_PER_SECOND, transient=True)


def headline() -> Table:
    """Return an empty row of three: a text, a bar over the width that is left, a text on the right."""
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    return head


def panel(console: Console, title: str | Text, *rows: RenderableType) -> Panel:
    """Draw rows in a frame that fits the terminal."""
    width = min(console.width - _ROOM_FOR_CTRL_C, _PANEL_WIDTH)
    return Panel(Group(*rows), title=title, title_align="left", border_style="dim", padding=(0, 1), width=width)


class LiveView:
    """A view that is up within a `with` block: a live panel, or, where `_live` is None, plain lines."""

    console: Console
    _live: Live | None
    _clock: Callable[[], float]
    _last_line: float

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._last_line = self._clock()
        self.console.print(Text(text), soft_wrap=True)


class ProgressView(LiveView):
    """What a run is doing, drawn while it runs.

    Args:
        console: Where to draw. A live panel if it is a terminal and `CI` is not set, else plain lines.
        enabled: False draws nothing (all processes but the main one).
        seconds_between_lines: The shortest time between two plain lines about training steps.
        clock: Returns seconds; replaced in tests.
    """

    def __init__(
        self,
        console: Console,
        *,
        enabled: bool = True,
        seconds_between_lines: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.enabled = enabled
        self._seconds_between_lines = seconds_between_lines
        self._clock = clock
        self.run("", "")
        self._spinner = Spinner("dots")
        self._live = live_panel(console, self.render) if enabled else None

    def run(self, name: str, method: str, goal: str = "", most_seconds: float | None = None) -> None:
        """Start the display of another run: its name, its method in words, and what would end it early."""
        self._name, self._method, self._goal = name, method, goal
        self._most_seconds, self._began = most_seconds, self._clock()
        self._phase, self._done, self._total = "starting", 0, 0
        self._phase_since = self._clock()
        self._step, self._first_step, self._max_steps = 0, 0, 0
        self._seconds_training = 0.0
        self._accuracies: list[float] = []
        self._success_rates: list[float] = []
        self._counts: dict[str, float] = {}
        self._last_line = -float("inf")

    # What a run tells its view

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        """Name what is going on, with its progress where it is known."""
        is_new = text != self._phase
        if is_new:
            self._close_phase()
        self._phase, self._done, self._total = text, done, total
        is_quiet = self._clock() - self._last_line >= self._seconds_between_lines
        if is_new and text != "training" and (self._step == self._first_step or is_quiet):
            self._line(f"{text} …")

    def begin(self, step: int, max_steps: int) -> None:
        """Say how many steps there will be, and at which one training starts (not 0 where it is resumed)."""
        self._began = self._clock()
        self._step = self._first_step = step
        self._max_steps = max_steps

    def step(self, step: int) -> None:
        """Say that optimizer step `step` is done."""
        self._step = step

    def log(self, logs: Mapping[str, Any]) -> None:
        """Take over the numbers of a row that the trainer logged, in training or in an evaluation."""
        accuracy = logs.get("eval_rollwise/accuracy")
        if accuracy is not None:
            self._accuracies.append(float(accuracy))
        if logs.get("rollwise/success_rate") is not None:
            self._success_rates.append(float(logs["rollwise/success_rate"]))
        self._counts |= {
            key.removeprefix("rollwise/"): float(value)
            for key, value in logs.items()
            if key.startswith("rollwise/") and isinstance(value, int | float)
        }
        is_due = self._clock() - self._last_line >= self._seconds_between_lines
        if accuracy is not None or (is_due and self._success_rates):
            self._line(self.line())

    def note(self, text: str) -> None:
        """Print a line that stays, above the panel."""
        if self.enabled:
            self.console.print(Text(text), soft_wrap=True)

    # What it makes of it

    def seconds_left(self) -> float | None:
        """Estimate the seconds until the last step from the mean of the steps so far; None before the first one.

        Time spent on evaluations counts as part of the steps, except for the evaluation before the first step.
        """
        steps_done = self._step - self._first_step
        if steps_done <= 0 or not self._max_steps:
            return None
        elapsed = self._seconds_training + (self._clock() - self._phase_since)
        left = (self._max_steps - self._step) * elapsed / steps_done
        if self._most_seconds is not None:
            left = min(left, self._most_seconds - (self._clock() - self._began))
        return left

    def line(self) -> str:
        """Put the state of the run into one line of plain text."""
        parts = [f"step {self._step}/{self._max_steps}"]
        if self._accuracies:
            parts.append(f"held-out accuracy {self._accuracies[-1]:.3f}")
        if self._success_rates:
            parts.append(f"success rate {self._success_rates[-1]:.3f}")
        if self._counts:
            generated, trained, replayed, wasted = self._rollouts()
            parts.append(f"rollouts {generated:,} generated, {trained:,} trained, {wasted:,} wasted")
            parts.append(f"{replayed:,} rows replayed")
        left = self.seconds_left()
        if left is not None and self._step < self._max_steps:
            parts.append(self._in_words(left))
        return " | ".join(parts)

    def render(self) -> RenderableType:
        """Draw the panel."""
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(ratio=1, no_wrap=True)
        if self._accuracies:
            change = f"  from {self._accuracies[0]:.3f} at the start  " if len(self._accuracies) > 1 else "  "
            value = Text(f"{self._accuracies[-1]:.3f}", style="bold green")
            value.append(change, style="dim").append(sparkline(self._accuracies), style="green")
            if self._goal:
                value.append(f"  {self._goal}", style="dim")
            rows.add_row("held-out accuracy", value)
        if self._success_rates:
            value = Text(f"{self._success_rates[-1]:.3f}", style="bold")
            value.append("  of the step's rollouts  ", style="dim").append(sparkline(self._success_rates))
            rows.add_row("success rate", value)
        if self._counts:
            generated, trained, replayed, wasted = self._rollouts()
            value = Text(f"{generated:,}", style="bold").append(" generated  ", style="dim")
            value.append(f"{trained:,}", style="bold cyan").append(" trained  ", style="dim")
            value.append(f"{wasted:,}", style="bold yellow")
            value.append(f" wasted ({share(wasted, generated)})", style="dim")
            rows.add_row("rollouts", value)
            value = Text(f"{replayed:,}", style="bold magenta").append(" rows", style="dim")
            if replayed and "age_mean" in self._counts:
                value.append(f"  mean age {self._counts['age_mean']:.1f} steps", style="dim")
            if "buffer_rollouts" in self._counts:
                value.append(f"  {self._counts['buffer_rollouts']:,.0f} in the buffer", style="dim")
            rows.add_row("replayed", value)
        title = Text.assemble((self._name or "rollwise", "bold"), f"  {self._method}" if self._method else "")
        return panel(self.console, title, self._headline(), rows)

    def _headline(self) -> RenderableType:
        """Draw the phase: a bar where steps are counted, a spinner and the seconds so far where they are not."""
        head = headline()
        what = f"{self._phase} {self._done}/{self._total}" if self._total else self._phase
        spent = duration(self._clock() - self._phase_since)
        if not self._max_steps:
            self._spinner.update(text=Text(what))
            head.add_row(self._spinner, "", Text(spent, style="dim"))
            return head
        left = self.seconds_left()
        right = self._in_words(left) if left is not None else spent
        bar = ProgressBar(total=self._max_steps, completed=self._step, complete_style="cyan")
        head.add_row(Text(f"step {self._step}/{self._max_steps}"), bar, Text(right))
        return Group(head, Text(what, style="dim"))

    def _in_words(self, seconds_left: float) -> str:
        """Say how much time is left; at most that much for a run that may reach its goal before."""
        return f"{'at most ' if self._goal else ''}{duration(seconds_left)} left"

    def _rollouts(self) -> tuple[int, int, int, int]:
        """Return the cumulative counts: generated, trained, replayed, wasted."""
        keys = ("rollouts_generated", "rollouts_trained", "rows_replayed", "rollouts_wasted")
        generated, trained, replayed, wasted = (int(self._counts.get(key, 0)) for key in keys)
        return generated, trained, replayed, wasted

    def _close_phase(self) -> None:
        """Add the seconds of the phase that ends, if steps were done in it or before it, to those of training."""
        now = self._clock()
        if self._phase == "training" or self._step > self._first_step:
            self._seconds_training += now - self._phase_since
        self._phase_since = now

    def _line(self, text: str) -> None:
        """Print a plain line where there is no panel."""
        if self.enabled and self._live is None:
            self._last_line = self._clock()
            self.console.print(Text(f"{self._name}: {text}" if self._name else text), soft_wrap=True)


class TakesNotes(Protocol):
    """A view that prints lines that stay."""

    def note(self, text: str) -> None:
        """Print a line."""
        ...


class _Notes(logging.Handler):
    """Shows log records as lines of a view."""

    def __init__(self, view: TakesNotes) -> None:
        super().__init__(logging.WARNING)
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record's message."""
        self._view.note(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def quiet_libraries(view: TakesNotes) -> Iterator[None]:
    """Keep the libraries' own progress bars away from a view, and show Rollwise's and their warnings in it.

    What a library will rename in its next release is its callers' business, not the user's: hidden unless `-W` is set.
    """
    import datasets
    import transformers.utils.logging as transformers_logging

    loggers = [
        logging.getLogger(name)
        for name in ("rollwise", "trl", "transformers", "datasets", "accelerate", "huggingface_hub")
    ]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    bars = (
        (transformers_logging.is_progress_bar_enabled(), transformers_logging.enable_progress_bar),
        (not datasets.are_progress_bars_disabled(), datasets.enable_progress_bars),
    )
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.handlers, logger.propagate = [_Notes(view)], False
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
            yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
        for was_enabled, enable in bars:
            if was_enabled:
                enable()
