"""The runs of a study: each a `rollwise train` in a process and a folder of its own, several at a time.

A run's folder `OUTPUT/<arm>/seed-<n>` holds `recipe.yaml`, `run.json` (arm, seed, versions, commit), `log.txt` and,
once it is finished, what `rollwise train` left and, written last, `done.json`. While it goes on, the metrics are in
`train/`. A folder without `done.json` is of a run that was cut off or failed; it is deleted and the run made again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import rollwise
from rollwise.errors import ConfigError
from rollwise.files import replacing
from rollwise.records.metrics import ACCURACY, read_evaluations, read_held_out, read_rows
from rollwise.records.summary import METRICS, SUMMARY, versions, write_json
from rollwise.study.aggregate import FinishedRun
from rollwise.study.spec import Run

RECIPE = "recipe.yaml"
RUN = "run.json"
LOG = "log.txt"
DONE = "done.json"
LOCK = "study.lock"
_WORKING = "train"  # `rollwise train` wants a folder without other files
_LOG_LINES = 12
_SECONDS_BETWEEN_LOOKS = 0.25
_SECONDS_TO_STOP = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Failure:
    """A run that did not end well: its folder, its exit code and the last lines of its log."""

    run: Run
    folder: Path
    exit_code: int
    log_end: str


@dataclass(frozen=True)
class Progress:
    """How far a run is; `accuracy` is its last held-out one, if there is one yet."""

    step: int = 0
    rollouts_generated: int = 0
    accuracy: float | None = None


class Watcher(Protocol):
    """What `run_all` tells about."""

    def started(self, run: Run) -> None:
        """A run's process was started."""

    def progress(self, run: Run, progress: Progress) -> None:
        """A run goes on."""

    def finished(self, run: Run, seconds: float, accuracy: float) -> None:
        """A run ended after `seconds`, loading included, with a last held-out accuracy."""

    def failed(self, failure: Failure) -> None:
        """A run failed."""


def folder_of(run: Run, output: Path) -> Path:
    """Return the folder of a run."""
    return output / run.arm / f"seed-{run.seed}"


def is_finished(run: Run, output: Path) -> bool:
    """Tell whether a run is done, with the very recipe that the study asks for now.

    Raises:
        ConfigError: It is done with another one.
    """
    import yaml  # type: ignore[import-untyped, unused-ignore]

    folder = folder_of(run, output)
    if not (folder / DONE).is_file():
        return False
    before, now = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8")), dict(run.fields)
    if before != now:
        was, is_now = ({name: repr(value) for name, value in fields.items()} for fields in (before, now))
        changes = [
            f"{name} was {was.get(name, 'not set')}, is {is_now.get(name, 'not set')}"
            for name in sorted(was.keys() | is_now.keys())
            if was.get(name) != is_now.get(name)
        ]
        raise ConfigError(
            f"{folder} holds a finished run with other settings than the study's now ({'; '.join(changes)}): delete "
            "that folder to make the run again, or name another --output"
        )
    return True


def load_run(run: Run, output: Path) -> FinishedRun:
    """Read what a finished run measured."""
    folder = folder_of(run, output)
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    totals = {name: value for name, value in summary.items() if isinstance(value, int | float) and name != "seed"}
    metrics = folder / METRICS
    evaluations = read_evaluations(metrics, int(run.fields.get("num_iterations", 1)))
    return FinishedRun(run.arm, run.seed, evaluations, totals, read_held_out(metrics))


def run_json(run: Run, output: Path) -> dict[str, Any]:
    """Read what `run.json` (versions, commit) says of a run."""
    content: dict[str, Any] = json.loads((folder_of(run, output) / RUN).read_text(encoding="utf-8"))
    return content


def source_commit() -> str | None:
    """Return the git commit of Rollwise's own source, with `-dirty` where it was edited; None if it is no checkout."""
    # Without optional locks it never gets in the way of a git command of the user's.
    git = ["git", "--no-optional-locks", "-C", str(Path(rollwise.__file__).parent)]

    def answer(*words: str) -> str:
        return subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        answer("ls-files", "--error-unmatch", "__init__.py")  # else it is installed in a repository of something else
        commit = answer("rev-parse", "HEAD")
        return f"{commit}-dirty" if answer("status", "--porcelain", "--untracked-files=no", "--", ".") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def run_all(runs: Sequence[Run], output: Path, *, study: str, processes: int, watcher: Watcher) -> list[Failure]:
    """Make runs, in their order, `processes` at a time; a failed one does not stop the others.

    Args:
        runs: The runs to make; each one's folder is emptied first.
        output: The study's folder.
        study: The study's name.
        processes: Runs at a time.
        watcher: Is told what happens.

    Returns:
        The runs that failed.

    Raises:
        ConfigError: `output` is not a study's folder, or another study is running in it.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP came; all children have been stopped.
    """
    waiting = list(runs)
    running: dict[Run, _Child] = {}
    failures = []
    with _locked(output) as lock, _heard_signals() as heard:
        try:
            while (waiting or running) and not heard:
                while waiting and len(running) < processes:
                    run = waiting.pop(0)
                    running[run] = _Child(run, folder_of(run, output), study, lock)
                    watcher.started(run)
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                for run, child in list(running.items()):
                    exit_code = child.process.poll()
                    if exit_code is None:
                        watcher.progress(run, child.progress())
                        continue
                    del running[run]
                    failure = child.settle(exit_code)
                    if failure is not None:
                        failures.append(failure)
                        watcher.failed(failure)
                    else:
                        accuracy = read_evaluations(child.folder / METRICS)[-1].accuracy
                        watcher.finished(run, time.monotonic() - child.began, accuracy)
        finally:
            for child in running.values():
                child.stop()
    if heard:
        raise KeyboardInterrupt
    return failures


class _Child:
    """The process of a run."""

    def __init__(self, run: Run, folder: Path, study: str, lock: IO[str]) -> None:
        import yaml

        self.run, self.folder, self.began = run, folder, time.monotonic()
        if folder.exists():
            shutil.rmtree(folder)
        with replacing(folder / RECIPE) as partial:
            partial.write_text(yaml.safe_dump(dict(run.fields), sort_keys=False), encoding="utf-8")
        about = {"study": study, "arm": run.arm, "seed": run.seed, "versions": versions(), "commit": source_commit()}
        write_json(folder / RUN, about)
        command = [sys.executable, "-m", "rollwise.cli", "train", str(folder / RECIPE)]
        command += ["--output_dir", str(folder / _WORKING), "--run_name", f"{study}-{run.arm}-seed-{run.seed}"]
        with (folder / LOG).open("w", encoding="utf-8") as log:
            # A session of its own: Ctrl-C reaches the study alone, which then ends the run and all that it started.
            # It keeps the lock open, so that no other study starts in the folder while this run is alive.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},  # the recipe's `env` has the last word, in the run itself
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )

    def progress(self) -> Progress:
        """Tell how far it is, from what it has logged."""
        rows = read_rows(self.folder / _WORKING / METRICS)
        if not rows:
            return Progress()
        accuracies = [row[ACCURACY] for row in rows if row.get(ACCURACY) is not None]
        return Progress(rows[-1]["step"], rows[-1]["rollouts_generated"], accuracies[-1] if accuracies else None)

    def settle(self, exit_code: int) -> Failure | None:
        """Put the results of a run that has ended in their place and mark it done, or say how it failed."""
        left = self.folder / _WORKING
        if exit_code == 0 and read_evaluations(left / METRICS):
            for path in left.iterdir():
                path.rename(self.folder / path.name)
            left.rmdir()
            write_json(self.folder / DONE, {"seconds_process": round(time.monotonic() - self.began, 3)})
            return None
        log = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        if exit_code == 0:
            log.append("it ended without an evaluation on held-out problems")
        return Failure(self.run, self.folder, exit_code, "\n".join(log[-_LOG_LINES:]))

    def stop(self) -> None:
        """End the process and all that it started."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_SECONDS_TO_STOP)
                return


@contextmanager
def _locked(output: Path) -> Iterator[IO[str]]:
    """Hold the study's folder for this study and its runs."""
    path = output / LOCK
    if output.exists() and not (output.is_dir() and (path.exists() or not any(output.iterdir()))):
        raise ConfigError(f"{str(output)!r} holds other files than a study's; name another --output")
    output.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"a study, or a run that outlived one, is at work in {str(output)!r}: wait for it, or end it "
                f"(`pgrep -f {output}/` lists it)"
            ) from None
        yield lock


@contextmanager
def _heard_signals() -> Iterator[list[int]]:
    """Collect the signals that ask to stop, so that none of them cuts the start of a child in two."""
    heard: list[int] = []
    before = {sign: signal.signal(sign, lambda number, frame: heard.append(number)) for sign in _SIGNALS}
    try:
        yield heard
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
