"""`rollwise pretrain`: make the embedded arithmetic model, or one of the embedded agents, again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from rollwise.commands.sources import ARITHMETIC
from rollwise.commands.view import ProgressView, quiet_libraries
from rollwise.tasks.agents import SHIPPED
from rollwise.usage import UsageError, require, suggestion


def pretrain(
    output_dir: Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    num_threads: int | None = None,
    task: str = ARITHMETIC,
    console: Console | None = None,
) -> None:
    """Run the warm-up with a progress view.

    Args:
        output_dir: Folder of the model; made if it is missing.
        seed: Seed of the weights and of the problems.
        steps: Optimizer steps; None takes the number that made the shipped model.
        num_threads: Threads of torch; None leaves them as they are.
        task: `arithmetic`, or the name of an agent.
        console: Where progress is drawn; stdout by default.

    Raises:
        UsageError: The folder is a file.
        ConfigError: An argument is out of its range.
    """
    require("torch", "transformers", "tokenizers", "datasets")
    if task not in (ARITHMETIC, *SHIPPED):
        raise UsageError(
            f"unknown task {task!r}{suggestion(task, SHIPPED)}; choose {', '.join((ARITHMETIC, *SHIPPED))}"
        )
    if task != ARITHMETIC:
        require("gymnasium", extra="envs")
    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError(f"output_dir {str(output_dir)!r} is a file; name a folder")
    with ProgressView(console or Console()) as view:
        view.phase("loading PyTorch")
        with quiet_libraries(view):
            if task != ARITHMETIC:
                _make_agent(task, output_dir, seed, steps, num_threads, view)
                return
            from rollwise.tasks.pretrain import pretrain as make

            view.run("pretrain", "the embedded arithmetic model")

            def on_progress(step: int, total: int, loss: float, accuracy: float | None) -> None:
                if step == 1:
                    view.begin(0, total)
                    view.phase("training")
                view.step(step)
                if accuracy is not None:
                    view.log({"eval_rollwise/accuracy": accuracy})

            chosen: dict[str, Any] = {} if steps is None else {"steps": steps}
            folder = make(output_dir, seed=seed, num_threads=num_threads, on_progress=on_progress, **chosen)
            view.note(f"model and tokenizer are in {folder}: rollwise train RECIPE.yaml --model_name_or_path {folder}")


def _make_agent(
    name: str, output_dir: Path, seed: int, steps: int | None, num_threads: int | None, view: ProgressView
) -> None:
    """Make an agent, with its progress in the view."""
    from rollwise.tasks.imitation import make_agent
    from rollwise.tasks.pretrain import threads

    view.run("pretrain", f"the embedded agent {name}")

    def on_progress(step: int, total: int, loss: float | None) -> None:
        if step == 0:
            view.phase("playing demonstrations")
            return
        if step == 1:
            view.begin(0, total)
        view.phase(f"imitating them (loss {loss:.3f})")
        view.step(step)

    with threads(num_threads):
        folder = make_agent(name, output_dir, seed=seed, steps=steps, on_progress=on_progress)
    view.note(f"the agent is in {folder}: rollwise train RECIPE.yaml --model_name_or_path {folder}")
