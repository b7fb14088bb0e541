"""`rollwise report`: one HTML page of what runs and studies measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rollwise.usage import UsageError, require


def report(
    paths: Sequence[Path],
    *,
    output: Path | None = None,
    baseline: str | None = None,
    target: float | None = None,
    samples: bool = True,
    console: Console | None = None,
) -> Path:
    """Write the page.

    Args:
        paths: Folders of runs and of studies, finished or going.
        output: The file; by default `report.html` in the folder where there is one, else in the working directory.
        baseline: The arm that the others are compared with; by default the study's, or the first.
        target: Held-out accuracy that rollouts are counted to; by default the study's, or the smallest peak.
        samples: Whether to show rollouts of checkpoints.
        console: Where it is said; stdout by default.

    Raises:
        UsageError: Something asked for does not exist, or cannot be written.
    """
    require("jinja2", "pyarrow", extra="report")
    from rollwise.report.render import REPORT, write_report

    paths = list(dict.fromkeys(paths))
    if output is None:
        output = paths[0] / REPORT if len(paths) == 1 and paths[0].is_dir() else Path(REPORT)
    elif output.is_dir():
        output = output / REPORT
    try:
        write_report(paths, output, baseline=baseline, target=target, samples=samples)
    except PermissionError as error:
        raise UsageError(f"{error.filename!r} may not be written or read; name another file with --output") from error
    text = f"{output} holds the report, {output.stat().st_size / 1e6:.1f} MB; open it in a browser"
    (console or Console()).print(text, markup=False, highlight=False, soft_wrap=True)
    return output
