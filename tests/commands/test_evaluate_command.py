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
from rich.console import Console
from tiny import model, tokenizer
from typer.testing import CliRunner

from rollwise.commands import evaluate as evaluate_module
from rollwise.commands.app import app
from rollwise.commands.evaluate import Options, evaluate
from rollwise.commands.evaluate_view import EvaluateView
from rollwise.errors import ConfigError
from rollwise.evaluation.generate import Completion
from rollwise.evaluation.verify import MathVerifier, Verdict
from rollwise.usage import UsageError


class PlayedEngine:
    """Answers 10 * (number of the problem) in every second sample, a tenth of it in the others."""

    name = "played"

    def __init__(self, *args, **kwargs):
        self.asked = []

    def check(self, prompts, sampling):
        self.prompts = prompts

    def generate(self, prompts, sampling, chunk):
        self.asked += prompts
        if len(self.asked) > getattr(self, "most", 1_000):
            raise KeyboardInterrupt
        numbers = [int(prompt.split()[0]) for prompt in prompts]
        return [
            [Completion(f"\\boxed{{{n if i % 2 else 10 * n}}}", 4 + i, i < 3) for i in range(sampling.samples)]
            for n in numbers
        ]


class PlayedVerifier(MathVerifier):
    """Compares text, and cannot score 40."""

    def verify(self, completion, answer):
        found = completion.removeprefix("\\boxed{").removesuffix("}")
        return (
            Verdict("unscored", found, "slow") if found == "40" else Verdict(["wrong", "right"][found == answer], found)
        )


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Run the command with a played model; gives what was printed."""
    engine = PlayedEngine()
    monkeypatch.setattr(evaluate_module, "make_engine", lambda *args, **kwargs: engine)
    monkeypatch.setattr(evaluate_module, "make_verifier", lambda name, seconds: PlayedVerifier(seconds))
    for name in ("one", "two"):
        rows = [{"problem": f"{i} times 10?", "answer": str(10 * i), "level": "easy"} for i in range(1, 6)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)

    def command(*benchmarks, **options):
        console = Console(file=io.StringIO(), width=200)
        options = {"samples": 4, "batch_size": 8, "output": tmp_path / "out"} | options
        evaluate("arithmetic", benchmarks or ("one.jsonl",), Options(**options), console)
        return console.file.getvalue()

    command.engine, command.output = engine, tmp_path / "out"
    return command


def summary(command):
    return json.loads((command.output / "summary.json").read_text())


def test_samples_and_figures(command):
    text = command("one.jsonl", "two.jsonl", ks=[1, 2, 4], max_tokens=9)
    rows = pq.read_table(command.output / "one" / "samples.parquet").to_pylist()
    assert len(rows) == 20
    assert rows[1] == {
        "problem_id": "0",
        "sample": 1,
        "completion": "\\boxed{1}",
        "extracted": "1",
        "verdict": "wrong",
        "reason": None,
        "tokens": 5,
        "finished": True,
    }
    found = summary(command)["benchmarks"]["one"]
    assert (found["problems"], found["problems_done"], found["samples"], found["samples_unscored"]) == (5, 5, 20, 2)
    assert found["share_unscored"] == 0.1
    assert found["avg"]["value"] == pytest.approx((4 * 0.5 + 0.0) / 5)
    assert found["pass_at_k"]["2"]["value"] == pytest.approx((4 * (1 - 1 / 6) + 0.0) / 5)
    assert found["pass_at_k"]["4"] == {"value": 1.0, "low": 1.0, "high": 1.0, "num_problems": 4}
    assert found["problems_left_out"] == {"1": 0, "2": 0, "4": 1}
    assert found["mean_tokens"]["right"] == 5.0
    assert found["mean_tokens"]["wrong"] == 6.0
    assert found["by_level"]["easy"]["num_problems"] == 5
    mean = summary(command)["mean"]
    assert mean["avg"]["value"] == pytest.approx(found["avg"]["value"])
    assert "Please reason" in command.engine.prompts[0]
    for words in (
        "2 samples could not be scored",
        "pass@4 leaves out 1 problem",
        "0.400",
        "mean",
        "25% of the samples",
    ):
        assert words in text, words


def test_a_run_that_was_cut_off_goes_on_without_repeating_problems(command):
    command.engine.most = 3
    with pytest.raises(KeyboardInterrupt):
        command("one.jsonl", "two.jsonl")
    assert [path.name for path in (command.output / "one" / "parts").iterdir()] == ["000000.parquet"]
    command.engine.most, command.engine.asked = 1_000, []
    command("one.jsonl", "two.jsonl")
    assert [int(prompt.split()[0]) for prompt in command.engine.asked] == [3, 4, 5, 1, 2, 3, 4, 5]
    assert not (command.output / "one" / "parts").exists()
    before = (command.output / "one" / "samples.parquet").read_bytes()
    command.engine.asked = []
    command("one.jsonl", "two.jsonl", ks=[3])
    assert command.engine.asked == []
    assert (command.output / "one" / "samples.parquet").read_bytes() == before
    assert list(summary(command)["mean"]["pass_at_k"]) == ["3"]


def test_other_settings_or_problems_are_refused_and_overwritten_when_asked(command, tmp_path):
    command()
    with pytest.raises(
        ConfigError, match=r"\(temperature was 1\.0, is 0\.5\): take another --output, or .* --overwrite"
    ):
        command(temperature=0.5)
    (tmp_path / "one.jsonl").write_text('{"problem": "1 times 10?", "answer": "10"}\n')
    with pytest.raises(ConfigError, match="problems was"):
        command()
    command(overwrite=True)
    assert summary(command)["benchmarks"]["one"]["problems"] == 1


def test_settings_of_a_run_without_any_sample_can_change(command):
    command.engine.most = 0
    with pytest.raises(KeyboardInterrupt):
        command()
    command.engine.most = 1_000
    command(temperature=0.5)
    assert summary(command)["settings"]["one"]["temperature"] == 0.5


def test_another_model_saved_in_the_same_folder_is_another_model(command, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("1")
    console = Console(file=io.StringIO())
    options = Options(samples=1, output=tmp_path / "out")
    evaluate(str(folder), ["one.jsonl"], options, console)
    (folder / "model.safetensors").write_text("22")
    with pytest.raises(ConfigError, match="weights was"):
        evaluate(str(folder), ["one.jsonl"], options, console)


def test_stored_samples_are_verified_anew_without_generating(command, monkeypatch):
    command("one.jsonl", "two.jsonl")
    command.engine.asked = []

    class Kind:
        def verify(self, completion, answer):
            return Verdict("right", "x")

        def close(self):
            pass

    monkeypatch.setattr(evaluate_module, "make_verifier", lambda name, seconds: Kind())
    command("one.jsonl", reverify=True, verifier="exact")
    assert command.engine.asked == []
    assert summary(command)["benchmarks"]["one"]["avg"]["value"] == 1.0
    assert summary(command)["settings"]["one"]["verifier"] == "exact"
    rows = pq.read_table(command.output / "one" / "samples.parquet").to_pylist()
    assert {(row["verdict"], row["extracted"], row["reason"]) for row in rows} == {("right", "x", None)}
    assert rows[1]["completion"] == "\\boxed{1}"
    console = Console(file=io.StringIO())
    evaluate("arithmetic", [], Options(output=command.output, reverify=True), console)
    assert set(summary(command)["benchmarks"]) == {"one", "two"}


def test_parts_can_be_verified_anew(command):
    command.engine.most = 3
    with pytest.raises(KeyboardInterrupt):
        command()
    text = command(reverify=True)
    assert "only 2 of 5 problems are done" in text
    command.engine.most = 1_000
    command()
    assert summary(command)["benchmarks"]["one"]["problems_done"] == 5


def test_aes_against_another_evaluation(command, tmp_path):
    command(output=tmp_path / "first", samples=2)
    text = command(reference=tmp_path / "first")
    found = summary(command)["aes"]["benchmarks"]["one"]
    assert found["length_saving"] == pytest.approx((4.5 - 5.5) / 4.5)
    assert found["accuracy_gain"] == pytest.approx(0.0)
    assert found["value"] == pytest.approx(-1.0 / 4.5)
    assert "AES against arithmetic" in text


@pytest.mark.parametrize(
    ("benchmarks", "options", "words"),
    [
        (["nothing"], {}, "unknown benchmark 'nothing': choose from arithmetic"),
        (["absent.jsonl"], {}, "no benchmark file"),
        (["one.jsonl", "./one.jsonl"], {}, "benchmark 'one' is named twice"),
        (["one.jsonl"], {"ks": [8]}, r"--k 8 must be within 1\.\.4"),
        (["one.jsonl"], {"reverify": True}, "holds no samples to verify"),
        (["one.jsonl"], {"reverify": True, "overwrite": True}, "choose one"),
        (["one.jsonl"], {"reference": Path("x")}, "reference 'x' is no evaluation"),
        (["one.jsonl"], {"samples": 0}, "samples is 0"),
        (["one.jsonl"], {"output": Path("one.jsonl")}, "is a file; name a folder"),
    ],
)
def test_mistakes_are_named_before_anything_is_generated(command, benchmarks, options, words):
    with pytest.raises((UsageError, ConfigError), match=words):
        command(*benchmarks, **options)
    assert command.engine.asked == []


def test_no_benchmark_no_model_and_no_hub_are_named(command, monkeypatch):
    with pytest.raises(UsageError, match="no benchmark: name one or more"):
        evaluate("arithmetic", [], Options())
    with pytest.raises(UsageError, match="no model folder"):
        evaluate("./absent", ["one.jsonl"], Options())

    def unreachable(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(UsageError, match=r"'math500' cannot be loaded from the hub: no network"):
        command("math500")


def test_the_options_take_several_values(monkeypatch):
    asked = {}

    def played(model, benchmarks, options):
        asked.update(model=model, benchmarks=benchmarks, options=options)

    monkeypatch.setattr(evaluate_module, "evaluate", played)
    words = [
        "evaluate",
        "m",
        "--benchmark",
        "math500",
        "a.jsonl",
        "--k",
        "1",
        "8",
        "--samples",
        "8",
        "--no-chat-template",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert (asked["model"], asked["benchmarks"]) == ("m", ["math500", "a.jsonl"])
    assert (asked["options"].ks, asked["options"].samples, asked["options"].chat_template) == ([1, 8], 8, False)


@pytest.fixture
def view(monkeypatch):
    monkeypatch.delenv("CI", raising=False)

    def view(terminal=False):
        view.now = 0.0
        console = Console(file=io.StringIO(), width=100, force_terminal=terminal, _environ={"TERM": "xterm"})
        return EvaluateView(console, "mine", clock=lambda: view.now)

    return view


def test_plain_lines_are_few_and_tell_the_time_left(view):
    shown = view()
    with shown:
        shown.begin(10)
        shown.benchmark("one", 10, 20)
        for second in range(1, 8):
            view.now = float(second)
            shown.advance(1, 4, 1, 1)
    assert shown.console.file.getvalue().splitlines() == [
        "one: 10/20 problems done",
        "one: 15/20 problems | 20 samples, 25% right, 5 unscored, about 5 s left",
    ]


def test_a_terminal_gets_a_panel(view):
    shown = view(terminal=True)
    with shown:
        shown.phase("loading")
        shown.console.print(shown.render())
        shown.begin(10)
        shown.benchmark("one", 0, 10)
        shown.advance(1, 4, 1, 0)
        shown.console.print(shown.render())
    text = shown.console.file.getvalue()
    for words in ("╭", "loading …", "1/10 problems", "4 samples, 25% right"):
        assert words in text, words


@pytest.mark.slow
def test_a_killed_process_leaves_what_is_done_and_ends_the_same(tmp_path):
    """The whole command with a real model, killed with SIGKILL, gives what an undisturbed run gives."""
    model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"problem": f"{i}+{i}=", "answer": str(2 * i)} for i in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # several threads on busy cores wait for each other

    def words(output):
        words = ["evaluate", str(tmp_path / "model"), "--benchmark", str(tmp_path / "sums.jsonl"), "arithmetic"]
        words += ["--samples", "2", "--max-tokens", "10", "--instruction", "", "--verifier", "exact", "--limit", "48"]
        return [*words, "--batch-size", "4", "--output", str(output)]

    command = [sys.executable, "-m", "rollwise.cli", *words(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=one_thread)
    parts = tmp_path / "killed" / "sums" / "parts"
    for _ in range(6000):
        if len(list(parts.glob("*.parquet"))) >= 3 or process.poll() is not None:
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    kept = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.parquet")}
    assert 3 <= len(kept) < 24
    again, whole = (CliRunner().invoke(app, words(tmp_path / name)) for name in ("killed", "whole"))
    assert again.exit_code == whole.exit_code == 0
    assert again.output.count("sums: ") >= 1
    for name in ("sums", "arithmetic"):
        tables = [pq.read_table(tmp_path / run / name / "samples.parquet") for run in ("killed", "whole")]
        assert tables[0].equals(tables[1])
    assert tables[0].num_rows == 48 * 2
