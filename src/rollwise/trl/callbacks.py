"""What the trainer does between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from rollwise.trl.trainer import RollwiseGRPOTrainer


class EndAndSaveCallback(TrainerCallback):
    """Ends the run when the scheduler says so, and saves only between generation batches.

    A checkpoint in the middle of a batch would lose its rows: TRL generates anew when it resumes. A save that falls
    there is postponed to the batch's end.

    Args:
        trainer: The trainer it belongs to.
    """

    def __init__(self, trainer: RollwiseGRPOTrainer) -> None:
        self._trainer = trainer
        self._is_save_due = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the trainer how long the run will be."""
        self._trainer.begin(state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Set the control's flags; runs after transformers' own callback has set its."""
        trainer = self._trainer
        if trainer.stop_reason is not None:
            control.should_training_stop = control.should_save = True
            control.should_evaluate |= args.eval_strategy != "no"  # what it came to
        self._is_save_due |= control.should_save
        between_batches = trainer._step % (args.steps_per_generation * trainer.num_iterations) == 0
        control.should_save = self._is_save_due and (between_batches or control.should_training_stop)
        self._is_save_due = self._is_save_due and not control.should_save
        return control
