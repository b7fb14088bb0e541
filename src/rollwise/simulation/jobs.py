"""Many simulated runs at once, in processes of their own where that pays."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from rollwise.allocation import Allocation
from rollwise.simulation.run import SimulatedRun, simulate

_SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class Job:
    """Arguments of `simulate`: an allocation, the prompts' rates, shape (P,), and the rest by name."""

    allocation: Allocation
    rates_P: NDArray[Any]
    options: Mapping[str, Any]

    def run(self, progress: Callable[[float], None]) -> SimulatedRun:
        """Play it."""
        return simulate(self.allocation, self.rates_P, **self.options, progress=progress)


def run_jobs(jobs: Sequence[Job], *, processes: int, progress: Callable[[float], None]) -> list[SimulatedRun]:
    """Play all jobs and return their runs, in order; the result does not depend on the number of processes.

    Args:
        jobs: What to play.
        processes: How many at a time; with 1, in this process.
        progress: Called now and then with the share of the work that is done, in [0, 1].
    """
    if processes == 1 or len(jobs) == 1:
        return [
            job.run(lambda share, done=done: progress((done + share) / len(jobs)))  # type: ignore[misc]
            for done, job in enumerate(jobs)
        ]
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", len(jobs))
    with context.Pool(min(processes, len(jobs)), _begin_worker, (shares,)) as pool:
        waiting = [pool.apply_async(_run_in_worker, (number, job)) for number, job in enumerate(jobs)]
        for result in waiting:
            while not result.ready():
                result.wait(_SECONDS_BETWEEN_LOOKS)
                progress(sum(shares[:]) / len(jobs))
        return [result.get() for result in waiting]


_shares: Any = None  # of a worker: the share that is done of each job


def _begin_worker(shares: Any) -> None:
    global _shares
    _shares = shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends the pool


def _run_in_worker(number: int, job: Job) -> SimulatedRun:
    def progress(share: float) -> None:
        _shares[number] = share

    return job.run(progress)
