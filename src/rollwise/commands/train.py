"""`rollwise train`: one run of a recipe with TRL and Rollwise and, if asked for, plain GRPO beside it.

Imported without torch; what needs it is imported once the progress view is up.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rollwise.commands.baseline import PLAIN_GRPO, compare, step_budget
from rollwise.commands.environments import EPISODE, episode_rollouts, load_levels
from rollwise.commands.run_tables import comparison_table, summary_table
from rollwise.commands.sources import load_problems, load_rewards, model_source
from rollwise.commands.view import ProgressView, quiet_libraries
from rollwise.evaluation.curve import Evaluation
from rollwise.records.metrics import Recorder
from rollwise.records.recipe import read_recipe
from rollwise.records.summary import LEDGER, METRICS, SUMMARY, finish_summary, start_summary, write_json
from rollwise.usage import UsageError, missing_extra, one_line, require

if TYPE_CHECKING:
    from rollwise.commands.arguments import Arguments

TRAIN_LIBRARIES = ("trl", "torch", "transformers", "datasets", "accelerate", "pyarrow")
_NEWEST_CHECKPOINT = ("latest", "true")


@dataclass(frozen=True)
class Outcome:
    """What a run came to: its `summary.json` and its measurements on the held-out problems."""

    summary: dict[str, Any]
    evaluations: list[Evaluation]


def train(recipe: Path, flags: list[str], console: Console | None = None) -> None:
    """Run a recipe.

    Args:
        recipe: YAML file of fields.
        flags: `--field value` pairs that override it.
        console: Where progress and results are drawn; stdout by default.

    Raises:
        UsageError: Something asked for does not exist or does not fit; nothing has been trained.
        RollwiseError: The run was ended for a reason that the message gives.
    """
    fields = read_recipe(recipe)
    require(*TRAIN_LIBRARIES)
    with ProgressView(console or Console(), enabled=is_main_process()) as view:
        view.phase("loading PyTorch and TRL")
        with quiet_libraries(view):
            _train(recipe, fields, flags, view)


def _train(recipe: Path, fields: dict[str, Any], flags: list[str], view: ProgressView) -> None:
    """Run a recipe, once the view is up."""
    from rollwise.commands.arguments import parse_arguments

    arguments = parse_arguments(recipe, fields, flags)
    _check_baseline(arguments)
    folder = Path(arguments.config.output_dir)
    _check_folder(arguments, folder)
    name = arguments.config.run_name
    view.run(name, _method(arguments))
    view.phase("reading the data set")
    sources = load_sources(arguments)
    if arguments.train.overwrite and is_main_process():
        _empty(folder)
    save_model = arguments.train.save_model
    outcome = _run(arguments, sources, view, close=not arguments.train.baseline, save_model=save_model)
    _show(view, summary_table(outcome.summary, name))
    report = _write_report(folder, view)
    files = [
        *(["the model with its card (README.md)"] if save_model else []),
        SUMMARY,
        METRICS,
        *([report] if report else []),
    ]
    view.note(f"{folder} holds {', '.join(files)} and {LEDGER}")
    if arguments.train.baseline:
        _run_baseline(recipe, fields, flags, arguments, sources, outcome, view)
        _write_report(folder, view)


def _run(
    arguments: Arguments,
    sources: tuple[Any, Any, list[Any]],
    view: ProgressView,
    callbacks: Sequence[Any] = (),
    *,
    close: bool,
    save_model: bool = True,
) -> Outcome:
    """Train once and leave the summary, the ledger, the metrics and the model in the run's folder.

    Args:
        arguments: The parsed recipe.
        sources: Problems to train on, held-out ones or None, and rewards.
        view: Where progress is drawn.
        callbacks: More `TrainerCallback`s.
        close: Whether this is the process's last run, after which trackers and process groups are closed.
        save_model: Whether to save the trained model.
    """
    from rollwise.commands.callbacks import RunCallback
    from rollwise.commands.episode_log import EpisodeLog
    from rollwise.records.episodes import EPISODES
    from rollwise.trl.checkpoints import newest_checkpoint

    config = arguments.config
    folder = Path(config.output_dir)
    view.phase("loading the model")
    trainer = build_trainer(arguments, sources)
    is_main = trainer.is_world_process_zero()
    recorder = Recorder(folder / METRICS if is_main else None, lambda: trainer.ledger.totals()["rollouts_generated"])
    shown: list[Any] = [RunCallback(view, recorder)]
    if arguments.train.environment:
        shown.append(EpisodeLog(folder / EPISODES if is_main else None, trainer.rollout_func))
    for callback in (*shown, *callbacks):
        trainer.add_callback(callback)
    start = start_summary(arguments.settings, config.seed)
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SUMMARY, start)

    def finish(status: str, reason: str | None) -> dict[str, Any]:
        summary = finish_summary(
            start,
            status=status,
            stop_reason=reason,
            steps=trainer.state.global_step,
            seconds=recorder.seconds,
            seconds_generation=trainer.seconds_generation,
            seconds_rollwise=trainer.seconds_rollwise,
            totals=trainer.ledger.totals(),
            evaluations=recorder.evaluations,
        )
        if is_main:
            trainer.ledger.save(folder / LEDGER)
            write_json(folder / SUMMARY, summary)
        return summary

    view.phase("preparing the first step")
    first_step = trainer.state.global_step
    try:
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
        evaluations = recorder.evaluations
        if config.eval_strategy != "no" and (not evaluations or evaluations[-1].step != trainer.state.global_step):
            trainer.evaluate()
    except KeyboardInterrupt:
        finish("interrupted", "stopped with Ctrl-C")
        checkpoint = newest_checkpoint(folder)
        resume = f"; --resume_from_checkpoint latest goes on from {checkpoint}" if checkpoint else ""
        view.note(f"stopped at step {trainer.state.global_step}, what was measured is in {folder}{resume}")
        raise
    except Exception as error:
        finish("failed", one_line(error))
        if isinstance(error, ValueError) and trainer.state.global_step == first_step:
            raise UsageError(one_line(error)) from error  # a setting that a library checks only now
        raise
    reason = trainer.stop_reason
    summary = finish("stopped" if reason else "finished", reason)
    if save_model:
        view.phase("saving the model")
        trainer.save_model(config.output_dir)
        trainer.create_model_card(model_name=config.run_name)
        if config.push_to_hub:
            view.phase("pushing to the hub")
            trainer.push_to_hub(dataset_name=arguments.train.dataset_name)
    if close and hasattr(trainer, "end"):
        trainer.end()
    return Outcome(summary, recorder.evaluations)


def _run_baseline(
    recipe: Path,
    fields: dict[str, Any],
    flags: list[str],
    arguments: Arguments,
    sources: tuple[Any, Any, list[Any]],
    outcome: Outcome,
    view: ProgressView,
) -> None:
    """Run the recipe as plain GRPO until it is as accurate as the run was at its end, and show the comparison."""
    from rollwise.commands.arguments import parse_arguments
    from rollwise.commands.callbacks import StopAtTarget

    first, last = outcome.evaluations[0].accuracy, outcome.evaluations[-1].accuracy
    if last <= first:
        view.note(f"no baseline: held-out accuracy did not rise ({first:.3f} to {last:.3f}), so there is no target")
        return
    config = arguments.config
    folder = Path(config.output_dir)
    is_main = is_main_process()
    if is_main:
        _empty(folder / "baseline")
    gc.collect()
    rollouts_per_step = (
        config.generation_batch_size
        * config.gradient_accumulation_steps
        / (config.steps_per_generation * config.num_iterations)
    )
    budget = round(arguments.train.baseline_budget * outcome.summary["rollouts_generated"])
    plain = parse_arguments(
        recipe,
        fields,
        flags,
        **PLAIN_GRPO,
        output_dir=folder / "baseline",
        run_name=f"{config.run_name}-baseline",
        max_steps=step_budget(budget, rollouts_per_step),
        learning_rate=arguments.train.baseline_learning_rate or config.learning_rate,
        save_strategy="no",
        push_to_hub=False,
    )
    plain.config.resume_from_checkpoint = None
    minutes = arguments.train.baseline_minutes
    seconds = None if minutes is None else 60 * minutes
    stop = StopAtTarget(last, seconds)
    within = f"{budget:,} rollouts" + (f" or {minutes:g} minutes" if minutes else "")
    view.note(f"now plain GRPO, until its held-out accuracy reaches {last:.3f} or for {within}")
    view.run(plain.config.run_name, _method(plain), goal=f"until {last:.3f}", most_seconds=seconds)
    baseline = _run(plain, sources, view, [stop], close=True, save_model=False)
    comparison = compare(
        outcome.evaluations,
        baseline.evaluations,
        rollouts=baseline.summary["rollouts_generated"],
        ended_by="time" if stop.out_of_time else "rollouts",
    )
    if is_main:
        write_json(folder / SUMMARY, outcome.summary | {"baseline": comparison.as_dict()})
    _show(view, comparison_table(comparison, outcome.summary, baseline.summary))
    _show(view, Text(comparison.sentence(), style="bold"))


def _write_report(folder: Path, view: ProgressView) -> str | None:
    """Write `report.html` into a run's folder, and return its name; None where jinja2 is missing or drawing failed.

    Whatever goes wrong is said and costs the page alone: the run is done, and `rollwise report` can draw it again.
    """
    if not is_main_process() or missing_extra("jinja2", "pyarrow", extra="report"):
        return None
    try:
        from rollwise.report.render import REPORT, write_report

        write_report([folder], folder / REPORT)
    except Exception as error:  # noqa: BLE001
        view.note(
            f"warning: the run is saved, but no report could be drawn of it ({type(error).__name__}: "
            f"{one_line(error)}); `rollwise report {folder}` tries again"
        )
        return None
    return REPORT


def load_sources(arguments: Arguments) -> tuple[Any, Any, list[Any]]:
    """Load the problems and the rewards."""
    config, chosen = arguments.config, arguments.train
    own = EPISODE if chosen.environment else chosen.dataset_name
    rewards = load_rewards(chosen.reward_funcs, chosen.reward_model_name_or_path, own)
    load = load_levels if chosen.environment else load_problems
    train_set, test_set = load(chosen, evaluate=config.eval_strategy != "no", seed=config.seed)
    return train_set, test_set, rewards


def build_trainer(arguments: Arguments, sources: tuple[Any, Any, list[Any]]) -> Any:
    """Build the trainer as TRL's own script does."""
    from transformers import PrinterCallback, ProgressCallback
    from trl import GRPOTrainer, get_peft_config, get_quantization_config

    from rollwise.tasks.agents import load_processor
    from rollwise.trl import RollwiseGRPOTrainer

    config, model = arguments.config, arguments.model
    train_set, test_set, rewards = sources
    init: dict[str, Any] = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    for holder in (model, config):  # the field moved from the one to the other
        if hasattr(holder, "trust_remote_code"):
            init["trust_remote_code"] = holder.trust_remote_code
    more: dict[str, Any] = {}
    if (quantization := get_quantization_config(model)) is not None:
        accepts = "quantization_config" in inspect.signature(GRPOTrainer.__init__).parameters
        (more if accepts else init)["quantization_config"] = quantization
    config.model_init_kwargs = init | (config.model_init_kwargs or {})
    source = model_source(model.model_name_or_path)
    rollouts = episode_rollouts(arguments.train) if arguments.train.environment else None
    try:
        trainer = RollwiseGRPOTrainer(
            model=source,
            reward_funcs=rewards,
            args=config,
            train_dataset=train_set,
            eval_dataset=test_set,
            peft_config=get_peft_config(model),
            rollout_func=rollouts,
            processing_class=load_processor(source),
            **more,
        )
    except OSError as error:
        raise UsageError(f"model {model.model_name_or_path!r} cannot be loaded: {one_line(error)[:400]}") from error
    except (ValueError, ImportError) as error:
        raise UsageError(one_line(error)) from error
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    return trainer


def _check_baseline(arguments: Arguments) -> None:
    """Refuse a comparison that could not be made, before anything is trained."""
    if not arguments.train.baseline:
        return
    if arguments.config.eval_strategy == "no":
        raise UsageError("--baseline compares held-out accuracies, but eval_strategy is 'no': set it to 'steps'")
    if arguments.config.allocation == "uniform" and not arguments.config.replay_settings().is_on:
        raise UsageError(
            "--baseline compares with plain GRPO, and this recipe is plain GRPO: set allocation or replay_ratio"
        )


def _check_folder(arguments: Arguments, folder: Path) -> None:
    """Refuse to overwrite a run, and find the checkpoint where one is to be resumed."""
    from rollwise.trl.checkpoints import newest_checkpoint

    config = arguments.config
    if config.push_to_hub and not arguments.train.save_model:
        raise UsageError("push_to_hub pushes the saved model, but save_model is false: leave one of them out")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"output_dir {str(folder)!r} is a file; name a folder")
    checkpoint = newest_checkpoint(folder) if folder.is_dir() else None
    if config.resume_from_checkpoint is not None:
        if arguments.train.overwrite:
            raise UsageError("--overwrite deletes the run that --resume_from_checkpoint would continue; choose one")
        if config.resume_from_checkpoint.lower() in _NEWEST_CHECKPOINT:
            if checkpoint is None:
                raise UsageError(
                    f"no checkpoint to resume in {str(folder)!r} (save_steps is {config.save_steps})"
                    f": leave out --resume_from_checkpoint to start anew"
                )
            config.resume_from_checkpoint = checkpoint
        elif not Path(config.resume_from_checkpoint).is_dir():
            raise UsageError(f"no checkpoint folder {config.resume_from_checkpoint!r}; 'latest' takes the newest one")
    elif folder.is_dir() and any(folder.iterdir()) and is_main_process():
        if _did_nothing(folder):
            arguments.train.overwrite = True
        if not arguments.train.overwrite:
            go_on = "go on with --resume_from_checkpoint latest, " if checkpoint else ""
            raise UsageError(
                f"{str(folder)!r} holds an earlier run: {go_on}delete it with --overwrite, or give this one "
                f"another --run_name"
            )
        if not (folder / SUMMARY).is_file():
            raise UsageError(f"{str(folder)!r} holds no {SUMMARY}, so it is not a run: delete it yourself")


def _did_nothing(folder: Path) -> bool:
    """Tell whether a folder holds a run that ended before its first step, which nobody will miss."""
    try:
        return bool(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["steps"] == 0)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _empty(folder: Path) -> None:
    """Delete what a folder holds."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _method(arguments: Arguments) -> str:
    """Put the method of a run into words."""
    config = arguments.config
    names = {"uniform": [], "pilot_commit": ["Pilot-Commit"]}
    parts = names.get(config.allocation, [config.allocation.replace("_", " ")])
    if config.replay_settings().is_on:
        parts.append("replay")
    return " + ".join(parts) or "plain GRPO"


def is_main_process() -> bool:
    """Tell whether this is the process that draws and writes, also before the trainer can say so."""
    return int(os.environ.get("RANK", "0")) == 0


def _show(view: ProgressView, renderable: Any) -> None:
    if view.enabled:
        view.console.print(renderable)
