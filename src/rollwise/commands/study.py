"""`rollwise study`: methods times seeds on one workload, and the table that compares them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from rollwise.commands.study_tables import notes, tables
from rollwise.commands.study_view import StudyView
from rollwise.errors import RollwiseError
from rollwise.files import replacing
from rollwise.records.summary import SUMMARY, write_json
from rollwise.study.aggregate import FinishedRun, aggregate
from rollwise.study.run import DONE, folder_of, is_finished, load_run, run_all, run_json
from rollwise.study.spec import Run, Study, read_study
from rollwise.usage import UsageError, require

PARQUET = "study.parquet"
_LIBRARIES = ("trl", "torch", "transformers", "datasets", "accelerate", "pyarrow")


class RunsFailedError(RollwiseError, RuntimeError):
    """Some runs of a study failed; the others were made."""


def study(
    path: Path,
    *,
    output: Path | None = None,
    processes: int | None = None,
    seeds: Sequence[int] | None = None,
    arms: Sequence[str] | None = None,
    aggregate_only: bool = False,
    interpolate: bool = False,
    markdown: bool = False,
    console: Console | None = None,
) -> None:
    """Make the runs of a study that are not done yet, and compare all that are.

    Args:
        path: The study's YAML file.
        output: The study's folder; `runs/<name>` by default.
        processes: Runs at a time; as many as cores by default.
        seeds: Make only the runs of these seeds.
        arms: Make only the runs of these arms.
        aggregate_only: Make none. `seeds` and `arms` then choose what the tables show, and no file is written.
        interpolate: Interpolate rollouts and seconds to the target between evaluations.
        markdown: Print Markdown tables.
        console: Where progress and tables are drawn; stdout by default.

    Raises:
        UsageError: Something asked for does not exist.
        ConfigError: The study is wrong, or does not fit what its folder holds.
        RunsFailedError: Some runs failed; the table of the others was printed.
    """
    require(*(("pyarrow",) if aggregate_only else _LIBRARIES))
    console = console or Console()
    asked = read_study(path)
    output = output or Path("runs") / asked.name
    chosen = asked.runs(arms, seeds)
    everything = asked.runs()
    finished = [run for run in everything if is_finished(run, output)]
    failures = []
    if not aggregate_only:
        if to_run := [run for run in chosen if run not in finished]:
            processes = processes or os.cpu_count() or 1
            seconds: dict[str, list[float]] = {}
            for run in finished:
                done = json.loads((folder_of(run, output) / DONE).read_text(encoding="utf-8"))
                seconds.setdefault(run.arm, []).append(done["seconds_process"])
            with StudyView(
                console,
                asked.name,
                total=len(chosen),
                to_run=to_run,
                processes=processes,
                seconds_of_arms=seconds,
            ) as view:
                try:
                    failures = run_all(to_run, output, study=asked.name, processes=processes, watcher=view)
                except KeyboardInterrupt:
                    console.print(f"stopped; the same command goes on, with what is done in {output}", markup=False)
                    raise
            finished = [run for run in everything if is_finished(run, output)]
    elif arms or seeds:
        finished = [run for run in finished if run in chosen]
    if finished:
        write = not aggregate_only or chosen == everything
        _compare(asked, finished, output, console, interpolate=interpolate, markdown=markdown, write=write)
    elif not failures:
        raise UsageError(f"{str(output)!r} holds no finished run of the study: leave out --aggregate-only to make them")
    if failures:
        names = ", ".join(failure.run.name for failure in failures)
        raise RunsFailedError(
            f"{len(failures)} of {len(chosen)} runs failed: {names}; their logs are {output}/<run>/log.txt, and the "
            "same command makes them again"
        )


def _compare(
    asked: Study,
    finished: Sequence[Run],
    output: Path,
    console: Console,
    *,
    interpolate: bool,
    markdown: bool,
    write: bool,
) -> None:
    """Aggregate the finished runs, write the files and print the tables."""
    runs = [load_run(run, output) for run in finished]
    summary = {
        "name": asked.name,
        "runs_finished": len(finished),
        "runs_missing": [run.name for run in asked.runs() if run not in finished],
        **aggregate(
            runs,
            arms=list(asked.arms),
            baseline=asked.baseline,
            target=asked.target,
            budget_rollouts=asked.budget_rollouts,
            interpolated=interpolate,
        ),
        "sources": _sources(finished, output),
    }
    if write:
        _write_parquet(runs, output / PARQUET)
        write_json(output / SUMMARY, summary)
    for table in tables(summary):
        if markdown:
            console.file.write(table.markdown() + "\n")
        else:
            console.print(table.rich())
    for note in notes(summary):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if write:
        console.print(f"{output} holds {SUMMARY} and {PARQUET}", markup=False, highlight=False, soft_wrap=True)


def _sources(finished: Sequence[Run], output: Path) -> list[dict[str, Any]]:
    """Return each set of versions and commit that runs were made with, with the names of these runs."""
    sources: list[dict[str, Any]] = []
    for run in finished:
        made = run_json(run, output)
        source = {"versions": made["versions"], "commit": made["commit"]}
        same = next((known for known in sources if source.items() <= known.items()), None)
        if same is None:
            sources.append(same := source | {"runs": []})
        same["runs"].append(run.name)
    return sources


def _write_parquet(runs: Sequence[FinishedRun], path: Path) -> None:
    """Write one row per run and evaluation; `run_<total>` and `last_<figure>` repeat the run's totals and its end."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"arm": run.arm, "seed": run.seed}
        | asdict(evaluation)
        | {f"run_{name}": value for name, value in run.totals.items()}
        | {f"last_{name}": value for name, value in run.held_out.items()}
        for run in runs
        for evaluation in run.evaluations
    ]
    with replacing(path) as partial:
        names = dict.fromkeys(name for row in rows for name in row)
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), partial)
