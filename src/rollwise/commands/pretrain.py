"""`rollwise pretrain`: make the embedded arithmetic model again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from rollwise.commands.errors import UsageError, missing_extra
from rollwise.commands.view import ProgressView, quiet_libraries


def pretrain(
    output_dir: Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    num_threads: int | None = None,
    console: Console | None = None,
) -> None:
    """Run the warm-up with a progress view.

    Args:
        output_dir: Folder of the model; made if it is missing.
        seed: Seed of the weights and of the problems.
        steps: Optimizer steps; None takes the number that made the shipped model.
        num_threads: Threads of torch; None leaves them as they are.
        console: Where progress is drawn; stdout by default.

    Raises:
        UsageError: The folder is a file.
        ConfigError: An argument is out of its range.
    """
    if problem := missing_extra("torch", "transformers", "tokenizers", "datasets"):
        raise UsageError(problem)
    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError(f"output_dir {str(output_dir)!r} is a file; name a folder")
    with ProgressView(console or Console()) as view:
        view.phase("loading PyTorch")
        with quiet_libraries(view):
            from rollwise.tasks import pretrain as task

            view.run("pretrain", "the embedded arithmetic model")

            def on_progress(step: int, total: int, loss: float, accuracy: float | None) -> None:
                if step == 1:
                    view.begin(0, total)
                    view.phase("training")
                view.step(step)
                if accuracy is not None:
                    view.log({"eval_rollwise/accuracy": accuracy})

            chosen: dict[str, Any] = {} if steps is None else {"steps": steps}
            folder = task.pretrain(output_dir, seed=seed, num_threads=num_threads, on_progress=on_progress, **chosen)
            view.note(f"model and tokenizer are in {folder}: rollwise train RECIPE.yaml --model_name_or_path {folder}")
