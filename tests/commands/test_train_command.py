import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from rollwise.commands import train as train_module
from rollwise.commands.train import train
from rollwise.errors import RewardError
from rollwise.ledger import Ledger
from rollwise.records.metrics import ACCURACY
from rollwise.usage import UsageError

RECIPE = """
allocation: pilot_commit
replay_ratio: 0.5
arithmetic_train_problems: 32
arithmetic_test_problems: 8
per_device_train_batch_size: 32
num_generations: 8
max_steps: 10
eval_steps: 2
use_cpu: true
bf16: false
gradient_checkpointing: false
"""


class FakeTrainer:
    """Plays the trainer: `curve(config, step)` is the held-out accuracy, a step costs one generation batch."""

    def __init__(self, config, curve, *, stop_after=None, error=None, error_at=1, is_main=True):
        self.args = config
        self.state = SimpleNamespace(global_step=0, max_steps=config.max_steps)
        self.control = SimpleNamespace(should_evaluate=False, should_training_stop=False)
        self.ledger = Ledger()
        self.stop_reason = None
        self.seconds_generation, self.seconds_rollwise = 1.5, 0.25
        self.saved = []
        self._curve, self._stop_after, self._error, self._is_main = curve, stop_after, error, is_main
        self._error_at = error_at
        self._callbacks = []

    def is_world_process_zero(self):
        return self._is_main

    def add_callback(self, callback):
        self._callbacks.append(callback)

    def _tell(self, event, **kwargs):
        for callback in self._callbacks:
            getattr(callback, event)(self.args, self.state, self.control, **kwargs)

    def evaluate(self):
        metrics = {ACCURACY: self._curve(self.args, self.state.global_step)}
        self._tell("on_log", logs=metrics)
        self._tell("on_evaluate", metrics=metrics)

    def train(self, resume_from_checkpoint=None):
        self._tell("on_train_begin")
        if self.args.eval_on_start:
            self.evaluate()
        while self.state.global_step < self.args.max_steps and not self.control.should_training_stop:
            if self._error is not None and self.state.global_step == self._error_at:
                raise self._error
            self._tell("on_step_begin")
            self.state.global_step += 1
            self.ledger.record_padding(self.state.global_step, self.args.generation_batch_size, 100)
            if self.state.global_step == self._stop_after:
                self.stop_reason = "all prompts are solved"
                break
            self._tell("on_step_end")
            self._tell("on_log", logs={"rollwise/success_rate": 0.5})
            if self.args.eval_strategy != "no" and self.state.global_step % self.args.eval_steps == 0:
                self.evaluate()

    def save_model(self, folder):
        self.saved.append(folder)

    def create_model_card(self, model_name):
        assert self.args.output_dir in self.saved, "a card goes with a model"


def rises(config, step):
    """Held-out accuracy: plain GRPO is three times as slow."""
    speed = 0.03 if config.allocation == "pilot_commit" else 0.01
    return round(0.2 + speed * step, 6)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run `rollwise train demo.yaml FLAGS` with a played trainer; gives what was printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.yaml").write_text(RECIPE)

    def run(*flags, curve=rises, recipe=None, **kwargs):
        if recipe is not None:
            (tmp_path / "demo.yaml").write_text(recipe)
        run.trainers = []

        def build(arguments, sources):
            run.trainers.append(FakeTrainer(arguments.config, curve, **kwargs))
            return run.trainers[-1]

        monkeypatch.setattr(train_module, "build_trainer", build)
        run.console = Console(file=io.StringIO(), width=200)
        train(tmp_path / "demo.yaml", list(flags), run.console)
        return run.console.file.getvalue()

    return run


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_run_leaves_its_summary_its_curve_its_ledger_and_its_model(run, tmp_path):
    text = run()
    folder = tmp_path / "runs" / "demo"
    content = summary(folder)
    assert content["status"] == "finished"
    assert content["steps"] == 10
    assert content["rollouts_generated"] == 320
    assert (content["heldout_accuracy_start"], content["heldout_accuracy_end"]) == (0.2, 0.5)
    assert (content["seconds_generation"], content["seconds_rollwise"]) == (1.5, 0.25)
    assert content["settings"]["replay_ratio"] == 0.5
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(row["rollouts_generated"], row[ACCURACY]) for row in rows if ACCURACY in row]
    assert curve == [(0, 0.2), (64, 0.26), (128, 0.32), (192, 0.38), (256, 0.44), (320, 0.5)]
    assert (folder / "ledger.parquet").is_file()
    assert run.trainers[0].saved == ["runs/demo"]
    assert not list(folder.glob("*.partial"))
    for words in ("loading PyTorch and TRL", "step 10/10", "demo: 10 steps", "from 0.200 (+0.300)", "runs/demo holds"):
        assert words in text, words


def test_a_run_leaves_its_report(run, tmp_path):
    text = run("--baseline")
    page = (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert "report.html" in text
    assert "demo: plain GRPO (baseline)" in page


def test_a_report_that_cannot_be_drawn_costs_nothing_else(run, tmp_path, monkeypatch):
    from rollwise.report import render

    def fail(data):
        raise ZeroDivisionError("of [nothing]")

    monkeypatch.setattr(render, "render", fail)
    text = run()
    assert "no report could be drawn of it (ZeroDivisionError: of [nothing]); `rollwise report runs/demo`" in text
    assert summary(tmp_path / "runs" / "demo")["status"] == "finished"
    assert not (tmp_path / "runs" / "demo" / "report.html").exists()
    monkeypatch.setattr(
        train_module, "missing_extra", lambda *modules, extra="trl": "no" if extra == "report" else None
    )
    assert "report" not in run("--overwrite")


def test_the_model_need_not_be_saved(run, tmp_path):
    text = run("--save_model", "false")
    assert run.trainers[0].saved == []
    assert "runs/demo holds summary.json" in text
    assert (tmp_path / "runs" / "demo" / "ledger.parquet").is_file()
    with pytest.raises(UsageError, match="push_to_hub pushes the saved model, but save_model is false"):
        run("--save_model", "false", "--push_to_hub", "--overwrite")


def leave_checkpoint(folder):
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")


def test_an_earlier_run_is_not_overwritten_unless_asked_for(run, tmp_path):
    run()
    with pytest.raises(UsageError, match="'runs/demo' holds an earlier run: delete it with --overwrite, or give"):
        run()
    leave_checkpoint(tmp_path / "runs" / "demo" / "checkpoint-5")
    with pytest.raises(UsageError, match="go on with --resume_from_checkpoint latest, delete it with --overwrite"):
        run()
    run("--overwrite", "--max_steps", "2")
    assert summary(tmp_path / "runs" / "demo")["steps"] == 2
    assert not (tmp_path / "runs" / "demo" / "checkpoint-5").exists()
    run("--run_name", "other")
    assert summary(tmp_path / "runs" / "other")["steps"] == 10


def test_overwrite_deletes_runs_only(run, tmp_path):
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.tex").write_text("...")
    with pytest.raises(UsageError, match=r"'precious' holds no summary.json, so it is not a run: delete it yourself"):
        run("--output_dir", "precious", "--overwrite")
    assert (folder / "thesis.tex").read_text() == "..."
    with pytest.raises(UsageError, match="is a file; name a folder"):
        run("--output_dir", "demo.yaml")


def test_a_mistake_leaves_no_folder_behind(run, tmp_path):
    with pytest.raises(UsageError, match="unknown reward"):
        run("--reward_funcs", "nothing")
    assert not (tmp_path / "runs").exists()


def test_resuming_takes_the_newest_checkpoint(run, tmp_path):
    with pytest.raises(UsageError, match=r"no checkpoint to resume in 'runs/demo' \(save_steps is 500\)"):
        run("--resume_from_checkpoint", "latest")
    run()
    for step in (5, 10):
        leave_checkpoint(tmp_path / "runs" / "demo" / f"checkpoint-{step}")
    (tmp_path / "runs" / "demo" / "checkpoint-15").mkdir()  # its saving was interrupted
    run("--resume_from_checkpoint", "latest")
    assert run.trainers[0].args.resume_from_checkpoint == "runs/demo/checkpoint-10"
    with pytest.raises(UsageError, match="no checkpoint folder 'runs/demo/checkpoint-7'"):
        run("--resume_from_checkpoint", "runs/demo/checkpoint-7")
    with pytest.raises(UsageError, match="choose one"):
        run("--resume_from_checkpoint", "latest", "--overwrite")


def test_plain_grpo_runs_until_it_is_as_accurate(run, tmp_path):
    text = run("--baseline")
    first, plain = run.trainers
    assert (plain.args.allocation, plain.args.replay_ratio, plain.args.drop_zero_variance) == ("uniform", 0.0, False)
    for same in ("seed", "learning_rate", "generation_batch_size", "num_generations", "eval_steps"):
        assert getattr(plain.args, same) == getattr(first.args, same)
    assert plain.args.max_steps == 30  # three times the rollouts of ten steps
    assert plain.state.global_step == 30
    assert plain.saved == []
    content = summary(tmp_path / "runs" / "demo")
    assert content["baseline"]["target"] == 0.5
    assert content["baseline"]["baseline"]["rollouts_generated"] == 960
    assert content["baseline"]["ratio"] == 3.0
    assert summary(tmp_path / "runs" / "demo" / "baseline")["rollouts_generated"] == 960
    assert "now plain GRPO, until its held-out accuracy reaches 0.500 or for 960 rollouts" in text
    sentence = (
        "This run reached a held-out accuracy of 0.500 after 320 rollouts, plain GRPO after 960: 3.0 times as many."
    )
    assert sentence in text


def test_plain_grpo_stops_as_soon_as_it_is_as_accurate(run):
    def curve(config, step):
        return rises(config, step) if config.allocation == "pilot_commit" else 0.2 + 0.04 * step

    run("--baseline")
    text = run("--baseline", "--overwrite", curve=curve)
    assert run.trainers[1].state.global_step == 8
    assert "plain GRPO after 256: this run needed 1.2 times as many." in text


def test_plain_grpo_that_never_gets_there(run, tmp_path):
    text = run("--baseline", "--baseline_budget", "2")
    assert run.trainers[1].args.max_steps == 20
    assert "plain GRPO did not reach it within 640: its best was 0.400." in text
    content = summary(tmp_path / "runs" / "demo")["baseline"]
    assert content["baseline"] is None
    assert content["ratio"] is None
    assert content["ended_by"] == "rollouts"


def test_plain_grpo_that_runs_out_of_time(run, tmp_path):
    text = run("--baseline", "--baseline_minutes", "1e-9")
    assert run.trainers[1].state.global_step == 1
    assert "(its time was over)" in text
    assert summary(tmp_path / "runs" / "demo")["baseline"]["ended_by"] == "time"


def test_plain_grpo_can_have_a_learning_rate_of_its_own(run):
    run("--baseline", "--learning_rate", "3e-4", "--baseline_learning_rate", "2e-4")
    assert [trainer.args.learning_rate for trainer in run.trainers] == [3e-4, 2e-4]


def test_without_progress_there_is_nothing_to_compare(run, tmp_path):
    text = run("--baseline", curve=lambda config, step: 0.3)
    assert "no baseline: held-out accuracy did not rise (0.300 to 0.300)" in text
    assert len(run.trainers) == 1
    assert not (tmp_path / "runs" / "demo" / "baseline").exists()


def test_comparisons_that_cannot_be_made_are_refused_at_once(run):
    with pytest.raises(UsageError, match="this recipe is plain GRPO: set allocation or replay_ratio"):
        run("--baseline", "--allocation", "uniform", "--replay_ratio", "0")
    with pytest.raises(UsageError, match="eval_strategy is 'no': set it to 'steps'"):
        run("--baseline", "--eval_strategy", "no")


def test_nothing_is_measured_if_nothing_shall_be(run, tmp_path):
    text = run("--eval_strategy", "no", "--eval_on_start", "false")
    assert summary(tmp_path / "runs" / "demo")["heldout_accuracy_end"] is None
    assert "held-out" not in text


def test_a_run_that_ends_early_says_why_and_is_measured(run, tmp_path):
    text = run(stop_after=3)
    content = summary(tmp_path / "runs" / "demo")
    assert (content["status"], content["stop_reason"]) == ("stopped", "all prompts are solved")
    assert content["heldout_accuracy_end"] == 0.29
    assert "all prompts are solved" in text
    assert run.trainers[0].saved == ["runs/demo"]


def test_ctrl_c_leaves_what_was_measured(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(error=KeyboardInterrupt())
    content = summary(tmp_path / "runs" / "demo")
    assert (content["status"], content["steps"], content["rollouts_generated"]) == ("interrupted", 1, 32)
    assert "stopped at step 1, what was measured is in runs/demo" in run.console.file.getvalue()


def test_a_failure_is_on_record(run, tmp_path):
    with pytest.raises(RewardError):
        run(error=RewardError("the reward failed\nfor every rollout"))
    content = summary(tmp_path / "runs" / "demo")
    assert (content["status"], content["stop_reason"]) == ("failed", "the reward failed for every rollout")


def test_a_setting_that_a_library_refuses_late_is_a_mistake(run, tmp_path):
    with pytest.raises(UsageError, match="Invalid learning rate: -1"):
        run(error=ValueError("Invalid learning rate: -1"), error_at=0)
    assert summary(tmp_path / "runs" / "demo")["status"] == "failed"
    with pytest.raises(ValueError, match="a bug") as error:  # what failed before its first step is in nobody's way
        run(error=ValueError("a bug"), error_at=3)
    assert not isinstance(error.value, UsageError)
    with pytest.raises(UsageError, match="holds an earlier run"):
        run()


def test_other_processes_neither_draw_nor_write(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run("--baseline", is_main=False) == ""
    assert len(run.trainers) == 2
    assert not (tmp_path / "runs").exists()


def test_no_secret_is_written(run, tmp_path):
    token = "hf_abcdefghijklmnopqrstuvwxyz"
    kwargs = json.dumps({"token": token, "revision": "main"})
    run("--hub_token", token, "--model_init_kwargs", kwargs)
    for path in (tmp_path / "runs" / "demo").iterdir():
        assert token.encode() not in path.read_bytes(), path
    assert summary(tmp_path / "runs" / "demo")["settings"]["hub_token"] == "(removed)"
