import json
import math

import numpy as np

from rollwise.evaluation.curve import Evaluation
from rollwise.records.metrics import ACCURACY, Recorder, read_evaluations, read_held_out


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_carry_step_seconds_and_rollouts(tmp_path):
    clock, generated = Clock(), iter([0, 512])
    recorder = Recorder(tmp_path / "m.jsonl", lambda: next(generated), clock=clock)
    clock.now = 5.0  # loading the model does not count
    recorder.begin(0)
    clock.now = 6.0
    recorder.add(0, {ACCURACY: 0.25, "eval_reward": np.float32(0.25)})
    clock.now = 8.5
    recorder.add(1, {"loss": math.nan, "rollwise/rollouts_generated": 512.0, "note": "x", "inf": math.inf})
    assert rows(tmp_path / "m.jsonl") == [
        {"step": 0, "seconds": 1.0, "rollouts_generated": 0, ACCURACY: 0.25, "eval_reward": 0.25},
        {
            "step": 1,
            "seconds": 3.5,
            "rollouts_generated": 512,
            "loss": None,
            "rollwise/rollouts_generated": 512.0,
            "note": "x",
            "inf": None,
        },
    ]
    assert recorder.evaluations == [Evaluation(0, 0, 0.25, 1.0)]


def test_a_new_run_starts_with_an_empty_file(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 9, "seconds": 1, "rollouts_generated": 1}\n')
    Recorder(path, lambda: 0).begin(0)
    assert path.read_text() == ""


def test_a_resumed_run_keeps_what_came_before_its_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    first = Recorder(path, lambda: 100, clock=Clock())
    first.begin(0)
    for step in range(1, 6):
        first.add(step, {ACCURACY: step / 10})
    with path.open("a") as file:
        file.write('{"step": 6, "seco')  # killed while writing
    text = path.read_text().replace('"seconds": 0.0', '"seconds": 7.0')
    path.write_text(text)

    clock = Clock()
    second = Recorder(path, lambda: 300, clock=clock)
    second.begin(3)
    clock.now = 2.0
    second.add(4, {ACCURACY: 0.9})
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4]
    assert [e.accuracy for e in second.evaluations] == [0.1, 0.2, 0.3, 0.9]
    assert rows(path)[-1]["seconds"] == 9.0


def test_without_a_file_rows_are_remembered_only():
    recorder = Recorder(None, lambda: 7)
    recorder.begin(0)
    recorder.add(2, {ACCURACY: 0.5})
    assert [(e.step, e.rollouts_generated, e.accuracy) for e in recorder.evaluations] == [(2, 7, 0.5)]


def test_evaluations_are_read_back_while_a_line_is_being_written(tmp_path):
    path = tmp_path / "m.jsonl"
    assert read_evaluations(path) == []
    recorder = Recorder(path, lambda: 100, clock=Clock())
    recorder.begin(0)
    recorder.add(1, {"loss": 0.5})
    recorder.add(2, {ACCURACY: 0.25})
    with path.open("a") as file:
        file.write('{"step": 3, "sec')
    assert read_evaluations(path) == recorder.evaluations == [Evaluation(2, 100, 0.25, 0.0)]


def test_rows_trained_are_those_of_the_last_step_logged_as_often_as_a_batch_is_trained_on(tmp_path):
    recorder = Recorder(tmp_path / "m.jsonl", lambda: 64)
    recorder.begin(0)
    recorder.add(0, {ACCURACY: 0.1})
    recorder.add(1, {"rollwise/rollouts_trained": 30.0, "rollwise/rows_replayed": 10.0})
    recorder.add(1, {ACCURACY: 0.2, "eval_rollwise/accuracy/easy": 0.5, "eval_loss": 1.0})
    assert [e.rows_trained for e in read_evaluations(tmp_path / "m.jsonl")] == [0, 40]
    assert [e.rows_trained for e in read_evaluations(tmp_path / "m.jsonl", num_iterations=2)] == [0, 80]
    assert read_held_out(tmp_path / "m.jsonl") == {"accuracy": 0.2, "accuracy/easy": 0.5}
    assert read_held_out(tmp_path / "none.jsonl") == {}
