"""How a run's trainer talks to the view and the recorder, and what ends plain GRPO early.

Imports transformers: import it only once a run is to start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from rollwise.commands.view import ProgressView
from rollwise.records.metrics import ACCURACY, Recorder

_EVALUATING = "evaluating on held-out problems"


class PredictionCallback(TrainerCallback):  # type: ignore[misc]
    """Shows how far an evaluation has come, under a name."""

    def __init__(self, view: ProgressView, name: str) -> None:
        self._view = view
        self._name = name
        self._evaluated = 0

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Count a batch of held-out problems."""
        self._evaluated += 1
        total = len(eval_dataloader) if hasattr(eval_dataloader, "__len__") else 0
        self._view.phase(self._name, self._evaluated, total)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the count of held-out batches."""
        self._evaluated = 0


class RunCallback(PredictionCallback):
    """Passes what the trainer does and logs on to the view and the recorder."""

    def __init__(self, view: ProgressView, recorder: Recorder) -> None:
        super().__init__(view, _EVALUATING)
        self._recorder = recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start at the first step, or at the one that is resumed."""
        self._recorder.begin(state.global_step)
        self._view.begin(state.global_step, state.max_steps)
        if args.eval_on_start:
            self._view.phase(_EVALUATING)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show that training goes on."""
        self._view.phase("training")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step."""
        self._view.step(state.global_step)
        if control.should_evaluate:
            self._view.phase(_EVALUATING)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the row and show it."""
        self._recorder.add(state.global_step, logs)
        self._view.log(logs)


class StopAtTarget(TrainerCallback):  # type: ignore[misc]
    """Ends a run at the first evaluation that reaches an accuracy, or after some time.

    The main process decides and all others follow, so that none of them waits for one that has stopped.
    """

    def __init__(self, target: float, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.out_of_time = False
        self._target = target
        self._seconds = seconds
        self._clock = clock
        self._started = clock()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the time."""
        self._started = self._clock()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Stop where the target is reached."""
        accuracy = (metrics or {}).get(ACCURACY)
        if _main_process_says(accuracy is not None and accuracy >= self._target):
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop where the time is over."""
        if self._seconds is not None and _main_process_says(self._clock() - self._started >= self._seconds):
            self.out_of_time = True
            control.should_training_stop = True


def _main_process_says(answer: bool) -> bool:
    """Return the main process's answer on every process."""
    answers = [answer]
    broadcast_object_list(answers)
    return answers[0]
