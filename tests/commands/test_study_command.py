import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console
from study_helpers import leave, play_train
from typer.testing import CliRunner

from rollwise.commands import study as study_module
from rollwise.commands.app import app
from rollwise.commands.study import RunsFailedError, study
from rollwise.commands.study_view import StudyView
from rollwise.errors import ConfigError
from rollwise.study import run as run_module
from rollwise.study.run import Failure, Progress
from rollwise.study.spec import Run, read_study
from rollwise.usage import UsageError

ROOT = Path(__file__).parents[2]
STUDY = {
    "name": "demo",
    "seeds": [0, 1],
    "arms": {"plain": {"end": 0.5}, "replay": {"end": 0.6}},
    "target": 0.6,
}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Run the command with a played training; gives what was printed."""
    monkeypatch.setattr(run_module, "_SECONDS_BETWEEN_LOOKS", 0.02)
    play_train(monkeypatch, tmp_path)

    def command(changes=(), width=200, **options):
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(STUDY | dict(changes), sort_keys=False))
        command.console = Console(file=io.StringIO(), width=width)
        study(path, output=tmp_path / "out", console=command.console, **options)
        return command.console.file.getvalue()

    command.output = tmp_path / "out"
    return command


def test_a_study_leaves_a_summary_a_data_frame_and_a_table(command):
    text = command()
    summary = json.loads((command.output / "summary.json").read_text())
    assert summary["runs_finished"] == 4
    assert summary["runs_missing"] == []
    assert summary["arms"]["replay"]["accuracy_difference"][-1]["value"] == pytest.approx(0.1)
    assert summary["arms"]["plain"]["rollouts_to_target"]["bound"] == ">="
    assert summary["arms"]["replay"]["rollouts_ratio"]["bound"] == ">="
    rows = pq.read_table(command.output / "study.parquet").to_pylist()
    assert [(row["arm"], row["seed"], row["step"]) for row in rows[:3]] == [
        ("plain", 0, 0),
        ("plain", 0, 1),
        ("replay", 0, 0),
    ]
    assert len(rows) == 8
    assert rows[1] == {
        **{"arm": "plain", "seed": 0, "step": 1, "rollouts_generated": 100, "seconds": 1.0, "accuracy": 0.5},
        **{"run_rollouts_generated": 100, "run_rollouts_trained": 50, "run_rows_replayed": 0, "run_seconds": 1.0},
        **{"rows_trained": 0, "last_accuracy": 0.5},
    }
    for words in ("replay - plain", "+0.100", ">= 1.00", "0/2", "whole budget", "4/4 runs done", "study.parquet"):
        assert words in text, words


def test_finished_runs_are_kept_and_failed_ones_made_again(command):
    arms = {"plain": {"end": 0.5}, "bad": {"end": 0.5, "play": "fail"}}
    with pytest.raises(RunsFailedError, match=r"2 of 4 runs failed: bad/seed-0, bad/seed-1; .*log\.txt"):
        command({"arms": arms})
    text = command.console.file.getvalue()
    assert "it is broken" in text
    assert "2 runs are missing: bad/seed-0, bad/seed-1" in text
    done = command.output / "plain" / "seed-0" / "done.json"
    before = done.stat().st_mtime_ns
    arms["bad"] = {"end": 0.7}
    text = command({"arms": arms})
    assert "plain/seed-0 starts" not in text
    assert "bad/seed-1 done" in text
    assert done.stat().st_mtime_ns == before
    assert "starts" not in command({"arms": arms})


def test_subsets_are_run_and_all_that_is_finished_is_compared(command):
    text = command(arms=["replay"], seeds=[1])
    assert "1/1 runs done" in text
    assert "3 runs are missing: plain/seed-0, replay/seed-0, plain/seed-1" in text
    summary = json.loads((command.output / "summary.json").read_text())
    assert summary["runs_missing"] == ["plain/seed-0", "replay/seed-0", "plain/seed-1"]
    command(arms=["plain"])
    assert json.loads((command.output / "summary.json").read_text())["runs_finished"] == 3


def test_aggregating_only_makes_no_runs_and_a_selection_no_files(command):
    with pytest.raises(UsageError, match="holds no finished run"):
        command(aggregate_only=True)
    command(seeds=[0])
    before = (command.output / "summary.json").read_bytes()
    text = command(aggregate_only=True, arms=["replay"])
    assert "plain" not in text.replace("plain/seed", "")
    assert (command.output / "summary.json").read_bytes() == before
    (command.output / "summary.json").unlink()
    assert "starts" not in command(aggregate_only=True)
    assert (command.output / "summary.json").is_file()


def test_other_settings_than_a_finished_run_s_are_refused(command):
    command(arms=["plain"])
    with pytest.raises(ConfigError, match=r"plain/seed-0 .* \(end was 0\.5, is 0\.9\): delete that folder"):
        command({"arms": {"plain": {"end": 0.9}, "replay": {"end": 0.6}}})


def test_markdown(command, tmp_path):
    path = tmp_path / "demo.yaml"
    path.write_text(yaml.safe_dump(STUDY | {"target": 0.5}, sort_keys=False))
    plain, replay, plain_1, replay_1 = read_study(path).runs()
    leave(plain, command.output, (0, 0.2), (100, 0.4), (200, 0.6))
    leave(replay, command.output, (0, 0.2), (100, 0.6), (200, 0.6))
    leave(plain_1, command.output, (0, 0.2), (100, 0.3), (200, 0.5))
    leave(replay_1, command.output, (0, 0.2), (100, 0.6), (200, 0.7), commit="other")
    text = command({"target": 0.5, "budget_rollouts": [100, 300]}, aggregate_only=True, markdown=True)
    assert "| arm | seeds | 100 | 300 |\n| --- | ---: | ---: | ---: |\n" in text
    assert "| plain | 2 | 0.350 [0.300, 0.400] | - |\n" in text
    assert "| replay - plain | paired | +0.250 [+0.200, +0.300] | - |\n" in text
    assert "| replay | 2/2 | 100 | 2.00 | 4 | 2.00 |\n" in text
    assert "2 different versions" in text


RUNS = [Run(arm, seed, {"max_steps": 10}) for seed in (0, 1) for arm in ("plain", "replay")]


@pytest.fixture
def view(monkeypatch):
    monkeypatch.delenv("CI", raising=False)

    def view(terminal=False, to_run=RUNS, **known):
        view.now = 0.0
        console = Console(file=io.StringIO(), width=100, force_terminal=terminal, _environ={"TERM": "xterm"})
        return StudyView(
            console,
            "demo",
            total=len(RUNS),
            to_run=to_run,
            processes=2,
            seconds_of_arms=known,
            clock=lambda: view.now,
        )

    return view


def test_time_left_is_taken_from_finished_runs_of_the_same_arm(view):
    shown = view(plain=[10.0, 20.0], replay=[30.0])
    assert shown.seconds_left() == (2 * 15 + 2 * 30) / 2
    shown.started(RUNS[1])
    view.now = 12.0
    assert shown.seconds_left() == (2 * 15 + 30 + 18) / 2
    assert view(replay=[30.0], to_run=RUNS[3:]).seconds_left() == 30.0  # one run cannot be shared


def test_before_a_run_is_finished_time_left_is_taken_from_its_speed(view):
    shown = view()
    assert shown.seconds_left() is None
    shown.started(RUNS[0])
    view.now = 20.0
    shown.progress(RUNS[0], Progress(4, 64))
    assert shown.seconds_left() == (30.0 + 3 * 50.0) / 2


def test_a_run_that_its_budget_ends_is_judged_by_its_rollouts(view):
    run = Run("plain", 0, {"max_steps": 1000, "budget_rollouts": 512})
    shown = view(to_run=[run])
    shown.started(run)
    view.now = 20.0
    shown.progress(run, Progress(4, 128))
    assert shown.seconds_left() == 60.0
    assert "plain/seed-0 step 4/1000, 128/512 rollouts" in shown.line()


def test_plain_lines_are_few(view):
    shown = view()
    shown.started(RUNS[0])
    shown.started(RUNS[1])
    for second in range(60):
        view.now = float(second)
        shown.progress(RUNS[0], Progress(second // 10, accuracy=0.25))
    shown.finished(RUNS[0], 60.0, 0.5)
    shown.failed(Failure(RUNS[1], Path("x"), 2, "last [line]"))
    lines = shown.console.file.getvalue().splitlines()
    assert lines == [
        "plain/seed-0 starts",
        "replay/seed-0 starts",
        "0/4 runs done, about 2 min 50 s left | plain/seed-0 step 3/10, held-out accuracy 0.250 | "
        "replay/seed-0 step 0/10",
        "plain/seed-0 done in 1 min 00 s, held-out accuracy 0.500 | 1/4 runs done, about 1 min 00 s left",
        "replay/seed-0 failed (exit code 2); the end of its log:",
        "last [line]",
    ]


def test_a_terminal_gets_a_panel(view):
    shown = view(terminal=True)
    with shown:
        shown.started(RUNS[0])
        shown.progress(RUNS[0], Progress(3, accuracy=0.25))
        shown.console.print(shown.render())
    text = shown.console.file.getvalue()
    assert "╭" in text
    assert "0/4 runs done" in text
    assert "step 3/10, held-out accuracy 0.250" in text
    assert "starts" not in text


def test_the_options_take_several_values(monkeypatch):
    asked = {}
    monkeypatch.setattr(study_module, "study", lambda path, **options: asked.update(path=path, **options))
    words = ["study", "s.yaml", "--seeds", "0", "1", "2", "--arms", "a", "b", "--processes", "3", "--markdown"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert (asked["path"], asked["seeds"], asked["arms"]) == (Path("s.yaml"), [0, 1, 2], ["a", "b"])
    assert (asked["processes"], asked["markdown"], asked["aggregate_only"]) == (3, True, False)
    result = CliRunner().invoke(app, ["study", "s.yaml", "--seeds", "many"])
    assert result.exit_code == 2
    assert "--seeds" in result.output


def test_help_says_what_a_study_is():
    result = CliRunner().invoke(app, ["study", "--help"])
    assert result.exit_code == 0
    for word in ("per_seed", "--aggregate-only", "--seeds", "budget_rollouts"):
        assert word in result.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_the_benchmarks_studies_are_ones(path):
    from rollwise.commands.arguments import parse_arguments

    study = read_study(path)
    for run in study.runs(seeds=study.seeds[:1]):
        fields = {name: value for name, value in run.fields.items() if name != "env"}
        assert parse_arguments(path, fields, []).config.max_steps > 0, run.name


TINY = """
name: tiny
seeds: [0, 1]
base: {base}
recipe:
  max_steps: 3
  eval_steps: 1
  per_device_train_batch_size: 32
  per_device_eval_batch_size: 32
  num_generations: 8
  arithmetic_train_problems: 256
  arithmetic_test_problems: 16
arms:
  grpo:
  replay: {{replay_ratio: 1.0, replay_warmup_steps: 0}}
"""


@pytest.mark.slow
def test_a_real_study_is_interrupted_and_goes_on(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY.format(base=ROOT / "examples" / "arithmetic_grpo.yaml"))
    words = [sys.executable, "-m", "rollwise.cli", "study", "tiny.yaml", "--processes", "1"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CI": "1"}
    output = tmp_path / "runs" / "tiny"
    second = output / "replay" / "seed-0"
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 240
        while not (second / "train" / "metrics.jsonl").is_file():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in stdout
    first = output / "grpo" / "seed-0" / "done.json"
    before = first.stat().st_mtime_ns
    assert not (second / "done.json").exists()

    words = [*words[:-1], "2"]
    result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert first.stat().st_mtime_ns == before
    assert "grpo/seed-0 starts" not in result.stdout
    summary = json.loads((output / "summary.json").read_text())
    assert summary["runs_finished"] == 4
    assert summary["arms"]["replay"]["rows_replayed"]["value"] > 0
    assert summary["arms"]["grpo"]["rows_replayed"]["value"] == 0
    rows = pq.read_table(output / "study.parquet").to_pylist()
    assert [row["step"] for row in rows] == [0, 1, 2, 3] * 4
    assert rows[-1]["last_accuracy"] == rows[-1]["accuracy"]
    assert rows[-1]["rows_trained"] > rows[-2]["rows_trained"] > 0
    assert 0 <= summary["arms"]["replay"]["held_out"]["pass@8"]["value"] <= 1
    assert not list(output.rglob("*.safetensors"))
    for seed in (0, 1):
        assert (output / "grpo" / f"seed-{seed}" / "ledger.parquet").is_file()
        settings = json.loads((output / "grpo" / f"seed-{seed}" / "summary.json").read_text())
        assert settings["seed"] == seed


def test_many_missing_runs_are_not_all_named():
    from rollwise.commands.study_tables import notes

    summary = {"interval": "", "arms": {}, "target_is_default": False, "sources": []}
    (_, text) = notes(summary | {"runs_missing": [f"run-{i}" for i in range(9)]})
    assert text == "9 runs are missing: run-0, run-1, run-2, run-3, run-4, run-5 and 3 others"
