"""The real command with the real trainer on the embedded model.

In this process where nothing but the result counts: to start another one, and import torch and TRL there, takes longer
than a run of a few steps.
"""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
from releases import HAS_IMAGES
from typer.testing import CliRunner

from rollwise.commands.app import app

EXAMPLES = Path(__file__).parents[2] / "examples"
#: All but those for GPUs and the hub, which test_qwen3_recipe.py follows up to the weights.
RECIPES = [path for path in sorted(EXAMPLES.glob("*.yaml")) if path.stem != "qwen3_math"]
#: Few and small steps: what is left of a recipe is its methods and its machine.
TINY = (
    *("--max_steps", "2", "--eval_steps", "2", "--replay_warmup_steps", "0"),
    *("--per_device_train_batch_size", "32", "--gradient_accumulation_steps", "2", "--num_generations", "8"),
    *("--per_device_eval_batch_size", "256", "--arithmetic_train_problems", "256", "--arithmetic_test_problems", "32"),
    *("--environment_train_rows", "16", "--environment_test_rows", "8"),
)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def rollwise(*words, folder):
    return subprocess.run(
        [sys.executable, "-m", "rollwise.cli", *map(str, words)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_trains(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", str(recipe), *TINY])
    if recipe.stem == "frozen_lake_vision" and not HAS_IMAGES:
        assert result.exit_code == 2
        assert re.search(r"needs Pillow and transformers>=5.6|install trl>=1.11", result.output)
        return
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    folder = tmp_path / "runs" / recipe.stem
    content = summary(folder)
    assert content["status"] == "finished"
    assert content["steps"] == 2
    assert f"| rollouts generated | {content['rollouts_generated']:,} |" in (folder / "README.md").read_text()
    assert 0.0 <= content["heldout_accuracy_start"] <= 1.0
    assert content["heldout_accuracy_end"] is not None
    assert 0 < content["seconds_generation"] < content["seconds"]
    assert f"step 2/2 | held-out accuracy {content['heldout_accuracy_end']:.3f}" in result.stdout

    import pyarrow.parquet as pq

    ledger = pq.read_table(folder / "ledger.parquet").to_pylist()
    assert sum(row["rollouts"] for row in ledger if row["kind"] == "generated") == content["rollouts_generated"]
    assert sum(row["rollouts"] for row in ledger if row["kind"] == "replayed") == content["rows_replayed"]

    from transformers import AutoConfig, AutoTokenizer

    (kind,) = AutoConfig.from_pretrained(folder).architectures
    assert getattr(transformers, kind).from_pretrained(folder).num_parameters() > 100_000
    assert AutoTokenizer.from_pretrained(folder)("S12=")["input_ids"]


@pytest.mark.slow
def test_a_run_can_be_compared_and_continued(tmp_path):
    recipe = EXAMPLES / "arithmetic_all.yaml"
    saving = ("--save_strategy", "steps", "--save_steps", "1")
    first = rollwise("train", recipe, *TINY, *saving, "--baseline", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert "plain GRPO" in first.stdout or "no baseline: held-out accuracy did not rise" in first.stdout
    folder = tmp_path / "runs" / "arithmetic_all"
    rollouts = summary(folder)["rollouts_generated"]

    longer = ("--max_steps", "3", "--resume_from_checkpoint", "latest")
    second = rollwise("train", recipe, *TINY, *saving, *longer, folder=tmp_path)
    assert second.returncode == 0, second.stderr
    assert second.stderr == ""
    assert summary(folder)["steps"] == 3
    assert summary(folder)["rollouts_generated"] > rollouts
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert set(steps) == {0, 1, 2, 3}


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_its_results(tmp_path):
    recipe = EXAMPLES / "arithmetic_all.yaml"
    words = [sys.executable, "-m", "rollwise.cli", "train", str(recipe), *TINY, "--max_steps", "500"]

    def hear_ctrl_c():  # what was started in the background ignores it, and so would its children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        words, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c
    ) as process:
        folder = tmp_path / "runs" / "arithmetic_all"
        deadline = time.monotonic() + 120
        while not ((folder / "metrics.jsonl").is_file() and '"step": 2' in (folder / "metrics.jsonl").read_text()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "stopped at step" in stdout
    assert "Traceback" not in stdout
    content = summary(folder)
    assert content["status"] == "interrupted"
    assert content["steps"] >= 2


def test_a_mistake_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", str(EXAMPLES / "arithmetic_all.yaml"), "--reward_funcs", "nothing"])
    assert result.exit_code == 2
    assert re.fullmatch(r"rollwise: unknown reward 'nothing'; choose from .*\n", result.stderr)


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path, monkeypatch, capsys):
    text = (EXAMPLES / "quickstart.py").read_text()
    assert text.count("max_steps=") == 1
    script = tmp_path / "quickstart.py"
    script.write_text(re.sub(r"max_steps=\d+", "max_steps=1", text))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert "held-out accuracy: 0." in capsys.readouterr().out
    assert (tmp_path / "runs" / "quickstart" / "ledger.parquet").is_file()


@pytest.mark.slow
def test_pretrain_makes_a_model(tmp_path):
    result = CliRunner().invoke(app, ["pretrain", str(tmp_path / "model"), "--steps", "2", "--num-threads", "1"])
    assert result.exit_code == 0, result.output
    assert "step 2/2 | held-out accuracy" in result.stdout
    assert (tmp_path / "model" / "model.safetensors").is_file()
