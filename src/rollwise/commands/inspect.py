"""`rollwise inspect`: what a checkpoint's scheduler holds, as a person, a script or a data frame wants it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rollwise.files import replacing
from rollwise.ledger import Ledger
from rollwise.records.stored import find_checkpoint, rows_of, waiting_and_stored
from rollwise.rollout import Rollout
from rollwise.storage import load_state
from rollwise.usage import require

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def inspect(
    checkpoint: Path,
    *,
    as_json: bool = False,
    parquet: Path | None = None,
    top: int = 10,
    console: Console | None = None,
) -> None:
    """Show the replay buffer, the waiting survivors and the ledger of a checkpoint.

    Args:
        checkpoint: A checkpoint's folder, or a run's folder, whose newest checkpoint is taken.
        as_json: Print JSON instead of tables.
        parquet: Also write every stored rollout as a row of this Parquet file.
        top: How many rollouts to show with their text: those most likely to be drawn; where that is not known, because
            the priority is the user's own, of the largest |advantage|.
        console: Where to print; stdout by default.

    Raises:
        UsageError: There is no checkpoint there.
        StateError: Its state is damaged.
    """
    require("pyarrow", "transformers")
    console = console or Console()
    folder = find_checkpoint(checkpoint)
    state = load_state(folder)
    waiting, stored = waiting_and_stored(state)
    rows = rows_of(folder, state, stored)
    found = _overview(folder, state, stored, waiting)
    if parquet is not None:
        _write_parquet(rows, parquet)
    if as_json:
        console.print_json(json.dumps(found | {"top": rows[:top]}))
        return
    for table in _tables(found, rows[:top]):
        console.print(table)
    if parquet is not None:
        console.print(f"{parquet} holds all {len(rows):,} stored rollouts")


def _overview(
    folder: Path, state: dict[str, Any], stored: Sequence[Rollout], waiting: Sequence[Rollout]
) -> dict[str, Any]:
    ledger = Ledger()
    ledger.load_state_dict(state["ledger"])
    ages = np.array([state["step"] - rollout.birth_step for rollout in stored], dtype=np.int64)
    sizes = np.abs([rollout.advantage for rollout in stored])
    values, counts = np.unique(ages, return_counts=True)
    return {
        "checkpoint": str(folder),
        "step": state["step"],
        "allocation": state["allocation"]["name"],
        "prompts_removed": len(state["pool"]["removed"]),
        "prompts": state["pool"]["num_prompts"],
        "epoch": state["pool"]["epoch"],
        "waiting_groups": len(state["waiting"]),
        "waiting_rollouts": len(waiting),
        "stored_rollouts": len(stored),
        "stored_bytes": sum(rollout.nbytes for rollout in stored),
        "stored_positive_share": float(np.mean([r.advantage > 0 for r in stored])) if stored else None,
        "rollouts_by_age": {int(age): int(count) for age, count in zip(values, counts, strict=True)},
        "abs_advantage_quantiles": np.quantile(sizes, _QUANTILES).round(4).tolist() if stored else None,
        "ledger": ledger.totals(),
        "outcomes": {name: count for name, count in ledger.by_outcome().items() if count},
    }


def _tables(found: dict[str, Any], rows: list[dict[str, Any]]) -> list[Table]:
    overview = Table(title=found["checkpoint"], show_header=False, title_justify="left")
    overview.add_column(style="bold")
    overview.add_column(justify="right")
    for name, value in (
        ("step", f"{found['step']:,}"),
        ("allocation", found["allocation"]),
        ("prompts, of which removed", f"{found['prompts']:,}, {found['prompts_removed']:,}"),
        ("survivors waiting", f"{found['waiting_groups']:,} with {found['waiting_rollouts']:,} pilots"),
        ("stored rollouts", f"{found['stored_rollouts']:,} in {found['stored_bytes'] / 1e6:,.1f} MB"),
        ("  with a positive advantage", _percent(found["stored_positive_share"])),
        ("  |advantage| min, quartiles, max", _numbers(found["abs_advantage_quantiles"])),
        ("rollouts generated", f"{found['ledger']['rollouts_generated']:,}"),
        *((f"  {name.replace('_', ' ')}", f"{count:,}") for name, count in found["outcomes"].items()),
        ("rows replayed", f"{found['ledger']['rows_replayed']:,}"),
    ):
        overview.add_row(name, value)

    ages = Table(title="stored rollouts by age", title_justify="left")
    ages.add_column("age in steps", justify="right")
    ages.add_column("rollouts", justify="right")
    ages.add_column("")
    most = max(found["rollouts_by_age"].values(), default=1)
    for age, count in found["rollouts_by_age"].items():
        ages.add_row(str(age), f"{count:,}", "█" * math.ceil(30 * count / most))

    is_known = bool(rows) and rows[0]["draw_share"] is not None
    title = "stored rollouts that are drawn most" if is_known else "stored rollouts of the largest |advantage|"
    best = Table(title=title, title_justify="left")
    for name in ("age", "draw share", "reward", "advantage", "group mean", "uses"):
        best.add_column(name, justify="right")
    best.add_column("prompt", overflow="ellipsis", no_wrap=True, max_width=40)
    best.add_column("completion", overflow="ellipsis", no_wrap=True, max_width=40)
    for row in rows:
        share = "-" if row["draw_share"] is None else f"{row['draw_share']:.2%}"
        numbers = (f"{row[name]:.3g}" for name in ("reward", "advantage", "group_mean", "num_uses"))
        best.add_row(str(row["age_steps"]), share, *numbers, repr(row["prompt"] or ""), repr(row["completion"] or ""))
    return [overview, *([ages, best] if rows else [])]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _numbers(values: list[float] | None) -> str:
    return "-" if values is None else "  ".join(f"{value:.3g}" for value in values)


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows), partial)
