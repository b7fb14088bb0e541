import io
import json
import xml.etree.ElementTree as ET

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from rollwise.commands import simulate as module
from rollwise.commands.app import app
from rollwise.commands.simulate import simulate
from rollwise.commands.simulate_plot import svg
from rollwise.commands.simulate_tables import _short
from rollwise.errors import ConfigError
from rollwise.simulation.spec import Simulation, parse_methods, read_rates, read_simulation
from rollwise.usage import UsageError

SMALL = {
    "prompts": 300,
    "train_prompts": 8,
    "group_size": 8,
    "steps": 20,
    "seeds": [0, 1],
    "gain_per_group": 0.01,
    "methods": {"grpo": {"allocation": "uniform"}, "pilot_commit": {"pilot_rollouts": 4, "solved_prompts": "remove"}},
}


@pytest.fixture
def command(tmp_path):
    def command(changes=(), width=100, **options):
        path = tmp_path / "simulation.yaml"
        path.write_text(yaml.safe_dump(SMALL | dict(changes), sort_keys=False))
        console = Console(file=io.StringIO(), width=width)
        simulate(path, json=tmp_path / "out.json", console=console, **options)
        command.summary = json.loads((tmp_path / "out.json").read_text())
        return console.file.getvalue()

    return command


def test_tables_plot_and_files(command, tmp_path):
    text = command(html=tmp_path / "pages" / "out.html")
    summary = command.summary
    assert summary["methods"]["grpo"]["rollouts_per_step"]["value"] == 64
    assert summary["methods"]["grpo"]["engines"] == ["scheduler"]
    shares = [estimate["value"] for estimate in summary["methods"]["pilot_commit"]["share_by_outcome"].values()]
    assert sum(shares) == pytest.approx(1)
    assert summary["methods"]["grpo"]["rollouts_ratio"] is None
    assert summary["methods"]["pilot_commit"]["rollouts_ratio"]["num_seeds"] == 2
    for words in ("pilot_commit", "gradient", "solved", "too hard", "● grpo  ▲ pilot_commit", "300 prompts, rlvr"):
        assert words in text, words
    assert "the real scheduler" in text
    page = (tmp_path / "pages" / "out.html").read_text()
    assert "prefers-color-scheme:dark" in page
    assert "http" not in page, "the page needs no network"
    picture = ET.fromstring(svg(summary))
    assert len(list(picture.iter("polyline"))) == 2


def test_names_are_escaped_in_the_page(command, tmp_path):
    command({"methods": {"a<b": {"allocation": "uniform"}}, "seeds": [0]}, html=tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert "a&lt;b" in page
    assert "a<b" not in page


def test_the_plot_rises_from_left_to_right(command):
    text = command({"methods": {"uniform": {}}, "steps": 60})
    rows = [line for line in text.splitlines() if "●" in line and ("│" in line or "┤" in line)]
    first = [row.index("●") for row in rows]
    assert first == sorted(first, reverse=True)
    assert len(rows) == 14


def test_the_result_does_not_depend_on_the_number_of_processes(command):
    command(processes=1)
    one = command.summary
    command(processes=2)
    assert {k: v for k, v in command.summary.items() if k != "seconds"} == {
        k: v for k, v in one.items() if k != "seconds"
    }


def test_progress_is_shown_when_it_takes_long(command, monkeypatch):
    assert "simulated" not in command()
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.0)
    assert "simulated" in command()


def test_why_a_run_ended_is_said(command):
    text = command({"bins": "1:1", "patience_prompts": 100}, markdown=True)
    assert "grpo ended: the last" in text
    assert "all solved" in text
    assert "| method |" in text
    assert "patience" in text
    assert "●" not in text


def test_a_pool_that_is_used_up_is_exhausted(command):
    text = command({"bins": "1:1", "patience_prompts": 0})
    assert command.summary["methods"]["pilot_commit"]["ended"] == ["exhausted", "exhausted"]
    assert command.summary["methods"]["grpo"]["ended"] == ["steps", "steps"]
    assert "pilot_commit ended: all 300 prompts have been removed" in text


def test_a_target_ends_runs_and_misses_are_bounds(command):
    text = command({"bins": "0.3-0.4:1", "target": 0.5, "steps": 1000, "budget_rollouts": 20_000})
    assert command.summary["methods"]["grpo"]["ended"] == ["target", "target"]
    assert "mean success of 0.500" in text
    text = command({"bins": "0.3-0.4:1", "target": 0.99})
    assert command.summary["methods"]["grpo"]["rollouts_to_target"]["bound"] == ">="
    assert "0/2" in text
    assert ">=" in text


def test_the_command_line_overrides_the_file(tmp_path):
    path = tmp_path / "simulation.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    words = ["simulate", str(path), "--methods", "uniform", "belief:first_rollouts=2", "--seeds", "3", "--steps", "3"]
    result = CliRunner().invoke(app, [*words, "--json", str(tmp_path / "out.json"), "--bins", "0.5:1"])
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out.json").read_text())
    assert list(summary["methods"]) == ["uniform", "belief"]
    assert summary["methods"]["uniform"]["seeds"] == [3]
    assert summary["methods"]["uniform"]["steps"]["value"] == 3
    assert summary["rates"] == "1 bins"


def test_methods_of_a_command_line():
    text = "pilot_commit:p_lower=0.2,bind_pilots=false,pilot_prompts=null,solved_prompts=remove"
    assert parse_methods(["uniform", text]) == {
        "uniform": {"allocation": "uniform"},
        "pilot_commit": {
            **{"allocation": "pilot_commit", "p_lower": 0.2, "bind_pilots": False, "pilot_prompts": None},
            "solved_prompts": "remove",
        },
    }
    assert list(parse_methods(["uniform:num_rollouts=4", "uniform"])) == ["uniform:num_rollouts=4", "uniform"]
    with pytest.raises(UsageError, match="'p_lower' is no setting"):
        parse_methods(["pilot_commit:p_lower"])


def test_rates_from_files(tmp_path):
    (tmp_path / "rates.csv").write_text("prompt,rate\na,0.25\nb,1\n")
    (tmp_path / "rates.json").write_text("[0.25, 1.0]")
    (tmp_path / "rates.jsonl").write_text('{"p": 0.25}\n{"p": 1}\n')
    pq.write_table(pa.table({"success_rate": [0.25, 1.0], "text": ["a", "b"]}), tmp_path / "rates.parquet")
    for kind in ("csv", "json", "jsonl", "parquet"):
        rates = read_rates(tmp_path / f"rates.{kind}").sample(None, np.random.default_rng(0))
        assert rates.tolist() == [0.25, 1.0], kind
    (tmp_path / "counts.csv").write_text("correct,total\n" + "0,8\n8,8\n4,8\n" * 30)
    found = read_rates(tmp_path / "counts.csv")
    assert found.is_pool
    assert "90 prompts with 8 rollouts each" in found.source
    path = tmp_path / "simulation.yaml"
    path.write_text("rates: counts.csv\n")
    assert read_simulation(path, {}).success_rates().source == found.source
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "bad.csv").write_text("rate\n1.5\n")
    (tmp_path / "words.csv").write_text("rate\nhigh\n")
    for name, words in (
        ("none.csv", "there is no such file, and the presets are rlvr"),
        ("other.csv", r"has the columns \['a', 'b'\]"),
        ("bad.csv", r"bad.csv: there are 1 rates from 1.5"),
        ("words.csv", "cannot be read"),
        ("simulation.yaml", "ends in '.yaml'"),
    ):
        with pytest.raises((UsageError, ConfigError), match=words):
            read_rates(tmp_path / name)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"promts": 3}, "unknown field 'promts'; did you mean 'prompts'"),
        ({"prompts": 0}, "prompts is 0; give a whole number"),
        ({"gain_per_group": "1e-4"}, "write 1.0e-4"),
        ({"seeds": [0, 0]}, "give each seed once"),
        ({"seeds": 3}, "write a list"),
        ({"methods": {"x": {}}}, "method x: allocation is 'x'; it must be one of"),
        ({"methods": {"uniform": {"rollouts": 3}}}, "method uniform: .* no setting 'rollouts'"),
        ({"methods": "uniform"}, "write a list of allocations"),
        ({"bins": 3}, "bins is 3; give a text"),
    ],
)
def test_mistakes_of_a_file_are_named(tmp_path, fields, words):
    path = tmp_path / "simulation.yaml"
    path.write_text(yaml.safe_dump(fields))
    with pytest.raises(ConfigError, match=words):
        read_simulation(path, {})


def test_defaults_and_a_list_of_methods(tmp_path):
    path = tmp_path / "simulation.yaml"
    path.write_text("methods: [uniform, belief]\n")
    assert read_simulation(path, {}) == Simulation(methods={"uniform": {}, "belief": {}})
    assert read_simulation(None, {}) == Simulation()
    assert Simulation().options(3)["budget_rollouts"] == 1_000_000
    assert Simulation(steps=5).options(3)["budget_rollouts"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (984, "984"), (983_723, "984k"), (1_660_000, "1.66M"), (999_900, "1M"), (5e12, "5,000G")],
)
def test_short_numbers(value, text):
    assert _short(value) == text
