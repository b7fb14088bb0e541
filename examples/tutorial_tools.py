"""What the tutorials share: the embedded task on a CPU, with one progress bar and small tables."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from rollwise.tasks import arithmetic
from rollwise.trl import RollwiseGRPOConfig, RollwiseGRPOTrainer

# TRL calls what the newest transformers has deprecated; nothing here can change that.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

#: As in real training data, many problems are hopeless at first (long additions) or solved.
LEVELS = (*arithmetic.DEFAULT_LEVELS, "add-4", "add-5", "add-4", "add-5", "add-4", "add-5")
# The newer name, where transformers has it; the older one is deprecated there.
_CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in RollwiseGRPOConfig.__dataclass_fields__
    else "gradient_checkpointing"
)


class _Bar(TrainerCallback):
    """A progress bar with the rollouts so far, in place of the trainer's log."""

    def __init__(self, trainer: RollwiseGRPOTrainer, label: str) -> None:
        self.trainer, self.label = trainer, label

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = tqdm(total=state.max_steps, desc=self.label, unit="step", leave=False)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.set_postfix_str(f"{self.trainer.ledger.totals()['rollouts_generated']:,} rollouts")
        self.bar.update()

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def make_trainer(label: str, *, reward: Any = arithmetic.exact_match_reward, **settings: Any) -> RollwiseGRPOTrainer:
    """The trainer of the quickstart, on a CPU; `settings` are fields of RollwiseGRPOConfig."""
    torch.set_num_threads(1)  # the model is too small for more to help
    problems = arithmetic.load_dataset(num_train=4_000, num_test=128, levels=LEVELS)
    defaults = {
        "output_dir": "runs/tutorial",
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 256,
        "num_generations": 16,  # 256 / 16 = 16 prompts a step
        "max_completion_length": arithmetic.MAX_COMPLETION_TOKENS,
        "num_generations_eval": 4,
        "per_device_eval_batch_size": 512,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        _CHECKPOINTING: False,
        "dataloader_pin_memory": False,
    }
    trainer = RollwiseGRPOTrainer(
        model=str(arithmetic.model_path()),
        reward_funcs=reward,
        args=RollwiseGRPOConfig(**(defaults | settings)),
        train_dataset=problems["train"],
        eval_dataset=problems["test"],
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(_Bar(trainer, label))
    return trainer


def accuracy(trainer: RollwiseGRPOTrainer) -> float:
    """Share of right answers to the held-out problems."""
    return float(trainer.evaluate()["eval_rollwise/accuracy"])


def logged(trainer: RollwiseGRPOTrainer, name: str) -> list[float]:
    """What the trainer has logged under `rollwise/<name>`, in order."""
    return [entry[f"rollwise/{name}"] for entry in trainer.state.log_history if f"rollwise/{name}" in entry]


def generated_by(trainer: RollwiseGRPOTrainer, key: str) -> dict[str, int]:
    """Generated rollouts by `"purpose"` or by `"outcome"`, as the ledger counts them."""
    counts: dict[str, int] = {}
    for record in trainer.ledger.records():
        if record["kind"] == "generated":
            counts[record[key]] = counts.get(record[key], 0) + record["rollouts"]
    return counts


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under headings, numbers with three digits."""
    cells = [
        [
            f"{cell:,.3f}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else str(cell)
            for cell in row
        ]
        for row in rows
    ]
    widths = [max(len(row[i]) for row in [headings, *cells]) for i in range(len(headings))]
    for row in [headings, ["-" * width for width in widths], *cells]:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print()
