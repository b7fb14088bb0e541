"""`rollwise pilot`: a few rollouts of a recipe's model on some of its prompts, to know how hard they are.

What is generated, scored and counted as a success is what training would: the recipe's own trainer evaluates, on
prompts of the train split.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rollwise.commands.train import TRAIN_LIBRARIES, build_trainer, is_main_process, load_sources
from rollwise.commands.view import ProgressView, quiet_libraries
from rollwise.files import replacing
from rollwise.records.recipe import read_recipe
from rollwise.simulation.rates import Rates, zero_variance_share
from rollwise.usage import UsageError, one_line, require

if TYPE_CHECKING:
    from rollwise.commands.arguments import Arguments

_COMPLETIONS_AT_ONCE = 256
_ROW = "_rollwise_row"


def pilot(
    recipe: Path,
    output: Path,
    *,
    prompts: int = 256,
    rollouts: int = 8,
    flags: list[str] | None = None,
    console: Console | None = None,
) -> None:
    """Generate pilots and write, for each prompt, how many succeeded.

    Args:
        recipe: YAML file of fields of `rollwise train`.
        output: CSV file with the columns `row` (of the train split), `correct` and `total` (scored rollouts).
        prompts: Prompts to try, drawn from the train split with the recipe's seed; all if it has fewer.
        rollouts: Rollouts per prompt.
        flags: `--field value` pairs that override the recipe.
        console: Where progress and results are drawn; stdout by default.

    Raises:
        UsageError: Something asked for does not exist or does not fit, or nothing could be scored.
    """
    fields = read_recipe(recipe)
    require(*TRAIN_LIBRARIES)
    with (
        ProgressView(console or Console(), enabled=is_main_process()) as view,
        tempfile.TemporaryDirectory(prefix="rollwise-pilot-") as scratch,
    ):
        view.phase("loading PyTorch and TRL")
        with quiet_libraries(view):
            _pilot(recipe, fields, output, prompts, rollouts, flags or [], view, Path(scratch))


def _pilot(
    recipe: Path,
    fields: dict[str, Any],
    output: Path,
    prompts: int,
    rollouts: int,
    flags: list[str],
    view: ProgressView,
    scratch: Path,
) -> None:
    from rollwise.commands.arguments import parse_arguments
    from rollwise.commands.callbacks import PredictionCallback

    arguments = parse_arguments(
        recipe,
        fields,
        flags,
        output_dir=scratch / "run",
        num_generations_eval=rollouts,
        per_device_eval_batch_size=rollouts * max(1, _COMPLETIONS_AT_ONCE // rollouts),
        eval_strategy="no",
        eval_accuracy_column=_ROW,
        report_to="none",
        push_to_hub=False,
    )
    view.run("pilot", f"{rollouts} rollouts a prompt")
    view.phase("reading the data set")
    train_set, _, rewards = load_sources(arguments)
    chosen = np.sort(np.random.default_rng(arguments.config.seed).permutation(len(train_set))[:prompts]).tolist()
    view.phase("loading the model")
    trainer = build_trainer(arguments, (train_set, None, rewards))
    trainer.add_callback(PredictionCallback(view, "generating pilots"))
    view.phase("generating pilots")
    try:
        trainer.evaluate(eval_dataset=train_set.select(chosen).add_column(_ROW, chosen))
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    counts = sorted((int(row), *count) for row, count in trainer.held_out.counts.items())
    if not counts:
        raise UsageError(f"none of {len(chosen)} prompts has a scored rollout: look at the reward function")
    if is_main_process():
        with replacing(output) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["row", "correct", "total"])
            writer.writerows(counts)
        if view.enabled:
            view.console.print(_table(arguments, np.array(counts)[:, 1:], len(train_set)))
        view.note(f"wrote {output}; next: rollwise simulate --rates {output} --prompts {len(train_set)}")


def _table(arguments: Arguments, counts_P2: np.ndarray[Any, Any], num_prompts: int) -> Table:
    """How hard the prompts are, and what that means for plain GRPO and for Pilot-Commit's thresholds."""
    config = arguments.config
    rates = Rates.counted(*counts_P2.T)
    pool_P = rates.sample(20_000, np.random.default_rng(0))
    size = config.num_generations
    teaches = ((pool_P >= config.p_lower) & (pool_P <= config.p_upper)).mean()
    table = Table(show_header=False)
    table.add_row("prompts tried", f"{len(counts_P2):,} of {num_prompts:,}")
    table.add_row("mean success", f"{counts_P2[:, 0].sum() / counts_P2[:, 1].sum():.3f}")
    table.add_row("no pilot succeeded", f"{(counts_P2[:, 0] == 0).mean():.0%} of them")
    table.add_row("all pilots succeeded", f"{(counts_P2[:, 0] == counts_P2[:, 1]).mean():.0%} of them")
    table.add_row("success rates", rates.source.partition(": ")[2] + " over prompts, fitted")
    table.add_row(
        f"groups of {size} without variance", f"{zero_variance_share(pool_P, size):.0%} expected, no gradient"
    )
    table.add_row(f"rates from {config.p_lower:g} to {config.p_upper:g}", f"{teaches:.0%} of prompts, by the fit")
    return table
