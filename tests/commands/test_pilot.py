import csv

import pytest

pytest.importorskip("trl")

from rich.console import Console

from rollwise.commands.pilot import pilot
from rollwise.commands.sources import load_problems
from rollwise.simulation.spec import read_rates
from rollwise.usage import UsageError

RECIPE = """
dataset_name: arithmetic
model_name_or_path: arithmetic
arithmetic_train_problems: 64
arithmetic_test_problems: 30
arithmetic_levels: [sort-3, sort-4, add-2]
num_generations: 8
per_device_train_batch_size: 16
max_completion_length: 10
eval_strategy: steps
use_cpu: true
bf16: false
seed: 3
"""

#: By its prompt alone a completion is right, wrong or (in one of four) not scored.
REWARD = """
def by_level(completions, level, **kwargs):
    seen = {}
    rewards = []
    for name in level:
        seen[name] = seen.get(name, 0) + 1
        rewards.append({"sort-3": 1.0, "sort-4": None if seen[name] % 4 == 0 else 0.0, "add-2": None}[name])
    return rewards
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "pilot_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def counts(path):
    with path.open(newline="") as file:
        return [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]


def test_successes_and_scored_rollouts_of_each_prompt_are_counted(recipe, tmp_path):
    output, console = tmp_path / "counts.csv", Console(width=100, record=True)
    flags = ["--reward_funcs", "pilot_rewards.by_level"]
    pilot(recipe, output, prompts=40, rollouts=4, flags=flags, console=console)

    from rollwise.commands.arguments import parse_arguments
    from rollwise.records.recipe import read_recipe

    arguments = parse_arguments(recipe, read_recipe(recipe), [])
    levels = load_problems(arguments.train, evaluate=False, seed=3)[0]["level"]
    rows = counts(output)
    assert len({row["row"] for row in rows}) == len(rows)
    expected = {"sort-3": (4, 4), "sort-4": (0, 3)}
    assert all((row["correct"], row["total"]) == expected[levels[row["row"]]] for row in rows)
    assert {levels[row["row"]] for row in rows} == set(expected)  # what nobody could score is left out
    assert 10 < len(rows) < 40
    read = read_rates(output)
    assert read.is_pool
    assert len(read.a_K) == len(rows)
    text = console.export_text()
    assert f"{len(rows)} of 64" in text
    assert f"rollwise simulate --rates {output} --prompts 64" in text
    assert not (tmp_path / "runs").exists()


def test_the_embedded_model_is_what_is_tried(recipe, tmp_path):
    output = tmp_path / "counts.csv"
    flags = ["--arithmetic_levels", "sort-3"]
    pilot(recipe, output, prompts=16, rollouts=4, flags=flags, console=Console(quiet=True))
    rows = counts(output)
    assert len(rows) == 16
    assert all(row["total"] == 4 for row in rows)
    assert sum(row["correct"] for row in rows) > 0.8 * 64


def test_where_nothing_can_be_scored_nothing_is_written(recipe, tmp_path):
    flags = ["--reward_funcs", "pilot_rewards.by_level", "--arithmetic_levels", "add-2"]
    with pytest.raises(UsageError, match="none of 8 prompts has a scored rollout"):
        pilot(recipe, tmp_path / "c.csv", prompts=8, rollouts=2, flags=flags, console=Console(quiet=True))
    assert not (tmp_path / "c.csv").exists()
