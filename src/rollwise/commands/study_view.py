"""The progress display of a study: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollwise.commands.view import LiveView, headline, live_panel, panel
from rollwise.records.text import duration
from rollwise.study.run import Failure, Progress
from rollwise.study.spec import Run


class StudyView(LiveView):
    """What a study is doing, drawn while it runs.

    Args:
        console: Where to draw.
        name: The study's name.
        total: All its runs.
        to_run: Those that are still to be made.
        processes: Runs at a time.
        seconds_of_arms: Seconds that finished runs of each arm took, for the estimate of the time left.
        seconds_between_lines: The shortest time between two plain lines about running steps.
        clock: Returns seconds; replaced in tests.
    """

    def __init__(
        self,
        console: Console,
        name: str,
        *,
        total: int,
        to_run: Sequence[Run],
        processes: int,
        seconds_of_arms: dict[str, list[float]],
        seconds_between_lines: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self._name, self._total, self._processes = name, total, processes
        self._waiting = list(to_run)
        self._done = total - len(to_run)
        self._failed = 0
        self._seconds = seconds_of_arms
        self._running: dict[Run, tuple[float, Progress]] = {}
        self._seconds_between_lines, self._clock = seconds_between_lines, clock
        self._last_line = clock()
        self._live = live_panel(console, self.render)

    def started(self, run: Run) -> None:
        """Show a run that starts."""
        self._waiting.remove(run)
        self._running[run] = self._clock(), Progress()
        if self._live is None:
            self.note(f"{run.name} starts")

    def progress(self, run: Run, progress: Progress) -> None:
        """Show how far a run is."""
        self._running[run] = self._running[run][0], progress
        if self._live is None and self._clock() - self._last_line >= self._seconds_between_lines:
            self.note(self.line())

    def finished(self, run: Run, seconds: float, accuracy: float) -> None:
        """Count a run that is done."""
        del self._running[run]
        self._seconds.setdefault(run.arm, []).append(seconds)
        self._done += 1
        self.note(f"{run.name} done in {duration(seconds)}, held-out accuracy {accuracy:.3f} | {self._overall()}")

    def failed(self, failure: Failure) -> None:
        """Show a run that failed, with the end of its log."""
        del self._running[failure.run]
        self._failed += 1
        self.note(f"{failure.run.name} failed (exit code {failure.exit_code}); the end of its log:\n{failure.log_end}")

    def seconds_left(self) -> float | None:
        """Estimate the seconds until the last run ends; None before anything is known.

        A run takes the mean of its arm's finished runs, else of all that are known; a running one of an arm without
        any is taken to go on at its speed. What is left is spread evenly over the processes, and is at least the
        longest single run's.
        """
        now = self._clock()
        known = {arm: sum(seconds) / len(seconds) for arm, seconds in self._seconds.items() if seconds}
        for run, (began, progress) in list(self._running.items()):
            share = _share_done(run, progress)
            if run.arm not in known and share:
                known[run.arm] = (now - began) / min(1.0, share)
        if not known:
            return None
        any_arm = sum(known.values()) / len(known)
        left = [known.get(run.arm, any_arm) for run in self._waiting]
        left += [
            max(0.0, known.get(run.arm, any_arm) - (now - began)) for run, (began, _) in list(self._running.items())
        ]
        return max(sum(left) / self._processes, max(left, default=0.0))

    def line(self) -> str:
        """Put the state of the study into one line of plain text."""
        return " | ".join(
            [self._overall(), *(f"{run.name} {_state(run, now)}" for run, (_, now) in self._running.items())]
        )

    def render(self) -> RenderableType:
        """Draw the panel."""
        rows = Table.grid(padding=(0, 2))
        for run, (_, progress) in list(self._running.items()):  # the panel is drawn by a thread of its own
            rows.add_row(Text(run.name, style="dim"), _state(run, progress))
        head = headline()
        bar = ProgressBar(total=max(1, self._total), completed=self._done, complete_style="cyan")
        done, *rest = self._overall().split(", ")
        head.add_row(done, bar, ", ".join(rest))
        return panel(self.console, Text(self._name, style="bold"), head, rows)

    def _overall(self) -> str:
        parts = [f"{self._done}/{self._total} runs done"]
        if self._failed:
            parts.append(f"{self._failed} failed")
        left = self.seconds_left()
        if left is not None and (self._waiting or self._running):
            parts.append(f"about {duration(left)} left")
        return ", ".join(parts)


def _bound(run: Run, name: str) -> int | None:
    bound = run.fields.get(name)
    return bound if isinstance(bound, int) and bound > 0 else None


def _share_done(run: Run, progress: Progress) -> float:
    """The share of its steps or of its budget of rollouts, whichever ends the run first."""
    steps, rollouts = _bound(run, "max_steps"), _bound(run, "budget_rollouts")
    return max(progress.step / steps if steps else 0.0, progress.rollouts_generated / rollouts if rollouts else 0.0)


def _state(run: Run, progress: Progress) -> str:
    steps, rollouts = _bound(run, "max_steps"), _bound(run, "budget_rollouts")
    parts = [f"step {progress.step}/{steps}" if steps else f"step {progress.step}"]
    if rollouts:
        parts.append(f"{progress.rollouts_generated:,}/{rollouts:,} rollouts")
    if progress.accuracy is not None:
        parts.append(f"held-out accuracy {progress.accuracy:.3f}")
    return ", ".join(parts)
