import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from rollwise.commands.callbacks import RunCallback, StopAtTarget
from rollwise.commands.view import ProgressView
from rollwise.records.metrics import ACCURACY, Recorder


def test_a_trainer_s_events_reach_the_view_and_the_recorder(tmp_path):
    view = ProgressView(Console(file=io.StringIO(), width=200), seconds_between_lines=0.0)
    recorder = Recorder(tmp_path / "m.jsonl", lambda: 64)
    callback = RunCallback(view, recorder)
    args = SimpleNamespace(eval_on_start=True)
    state = SimpleNamespace(global_step=0, max_steps=2)
    control = SimpleNamespace(should_evaluate=False)
    callback.on_train_begin(args, state, control)
    callback.on_prediction_step(args, state, control, eval_dataloader=[1, 2, 3])
    callback.on_log(args, state, control, logs={ACCURACY: 0.25})
    callback.on_evaluate(args, state, control)
    callback.on_step_begin(args, state, control)
    state.global_step, control.should_evaluate = 1, True
    callback.on_step_end(args, state, control)
    callback.on_log(args, state, control, logs={"rollwise/success_rate": 0.5, "rollwise/rollouts_generated": 64.0})
    text = view.console.file.getvalue()
    assert "step 0/2 | held-out accuracy 0.250" in text
    assert "step 1/2 | held-out accuracy 0.250 | success rate 0.500 | rollouts 64 generated" in text
    assert [(e.step, e.accuracy, e.rollouts_generated) for e in recorder.evaluations] == [(0, 0.25, 64)]
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("accuracy", "stops"), [(0.39, False), (0.4, True), (0.5, True), (None, False)])
def test_plain_grpo_stops_at_the_target(accuracy, stops):
    callback = StopAtTarget(0.4, seconds=None)
    control = SimpleNamespace(should_training_stop=False)
    callback.on_evaluate(None, None, control, metrics={} if accuracy is None else {ACCURACY: accuracy})
    callback.on_step_end(None, None, control)
    assert control.should_training_stop is stops
    assert not callback.out_of_time


def test_plain_grpo_stops_when_its_time_is_over():
    now = [100.0]
    callback = StopAtTarget(0.4, seconds=60.0, clock=lambda: now[0])
    control = SimpleNamespace(should_training_stop=False)
    now[0] = 150.0
    callback.on_train_begin(None, None, control)
    now[0] = 209.0
    callback.on_step_end(None, None, control)
    assert not control.should_training_stop
    now[0] = 210.0
    callback.on_step_end(None, None, control)
    assert control.should_training_stop
    assert callback.out_of_time
