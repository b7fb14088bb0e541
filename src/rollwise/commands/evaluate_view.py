"""The progress display of an evaluation: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollwise.commands.view import LiveView, headline, live_panel, panel
from rollwise.records.text import duration, share


class EvaluateView(LiveView):
    """What an evaluation is doing, drawn while it runs.

    Args:
        console: Where to draw.
        name: The model's name.
        seconds_between_lines: The shortest time between two plain lines.
        clock: Returns seconds; replaced in tests.
    """

    def __init__(
        self,
        console: Console,
        name: str,
        *,
        seconds_between_lines: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self._name = name
        self._seconds_between_lines, self._clock = seconds_between_lines, clock
        self._last_line = clock()
        self._phase = ""
        self._benchmark, self._done, self._total = "", 0, 0
        self._left_at_start = self._left = 0
        self._began = clock()
        self._samples = self._right = self._unscored = 0
        self._live = live_panel(console, self.render)

    def phase(self, text: str) -> None:
        """Name what is going on."""
        self._phase = text
        if self._live is None:
            self.note(f"{text} …")

    def begin(self, problems_left: int) -> None:
        """Say how many problems are left, of all benchmarks."""
        self._phase = ""
        self._began, self._left_at_start, self._left = self._clock(), problems_left, problems_left

    def benchmark(self, name: str, done: int, total: int) -> None:
        """Start the display of a benchmark, `done` of whose problems are finished."""
        self._benchmark, self._done, self._total = name, done, total
        self._samples = self._right = self._unscored = 0
        if self._live is None and done < total:
            self.note(f"{name}: {done}/{total} problems done")

    def advance(self, problems: int, samples: int, right: int, unscored: int) -> None:
        """Count problems that are done, and what became of their samples."""
        self._done, self._left = self._done + problems, self._left - problems
        self._samples, self._right = self._samples + samples, self._right + right
        self._unscored += unscored
        if self._live is None and self._clock() - self._last_line >= self._seconds_between_lines:
            self.note(self.line())

    def seconds_left(self) -> float | None:
        """Estimate the seconds until the last problem is done from the mean of those so far; None before the first."""
        done = self._left_at_start - self._left
        return self._left * (self._clock() - self._began) / done if done else None

    def line(self) -> str:
        """Put the state into one line of plain text."""
        return f"{self._benchmark}: {self._done}/{self._total} problems | {self._state()}"

    def render(self) -> RenderableType:
        """Draw the panel."""
        if self._phase:
            return panel(self.console, Text(self._name, style="bold"), Text(f"{self._phase} …"))
        head = headline()
        bar = ProgressBar(total=max(1, self._total), completed=self._done, complete_style="cyan")
        head.add_row(Text(self._benchmark), bar, f"{self._done}/{self._total} problems")
        state = Table.grid()
        state.add_row(Text(self._state(), style="dim"))
        return panel(self.console, Text(self._name, style="bold"), head, state)

    def _state(self) -> str:
        parts = [f"{self._samples:,} samples"]
        if self._samples:
            parts.append(f"{share(self._right, self._samples)} right")
        if self._unscored:
            parts.append(f"{self._unscored:,} unscored")
        if (left := self.seconds_left()) is not None and self._left:
            parts.append(f"about {duration(left)} left")
        return ", ".join(parts)
