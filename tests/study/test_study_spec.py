import os

import pytest
import yaml

from rollwise.errors import ConfigError
from rollwise.study.spec import read_study
from rollwise.usage import UsageError

STUDY = {"name": "demo", "seeds": [0, 3], "arms": {"plain": {"learning_rate": 1e-4}, "replay": {"replay_ratio": 1.0}}}


@pytest.fixture
def read(tmp_path):
    def read(**changes):
        path = tmp_path / "studies" / "study.yaml"
        path.parent.mkdir(exist_ok=True)
        content = {key: value for key, value in (STUDY | changes).items() if value != "(absent)"}
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return read_study(path)

    return read


def test_runs_are_balanced_over_seeds(read):
    names = ["plain/seed-0", "replay/seed-0", "plain/seed-3", "replay/seed-3"]
    assert [run.name for run in read().runs()] == names
    assert [run.name for run in read().runs(seeds=[3])] == names[2:]
    assert [run.name for run in read().runs(arms=["replay"])] == names[1::2]
    with pytest.raises(ConfigError, match="no arm pilot; it has plain, replay"):
        read().runs(arms=["pilot"])
    with pytest.raises(ConfigError, match="no seed 1; it has 0, 3"):
        read().runs(seeds=[1])


def test_later_settings_win_and_what_a_study_sets_is_passed_over(read, tmp_path, monkeypatch):
    monkeypatch.delenv("ROLLWISE_TEST_VARIABLE", raising=False)
    (tmp_path / "base.yaml").write_text(
        "seed: 7\noutput_dir: x\nbaseline: true\nlearning_rate: 1.0\nmax_steps: 1\neval_steps: 1\n"
        "env: {ROLLWISE_TEST_VARIABLE: 1, B: 2}\n"
    )
    (tmp_path / "other.yaml").write_text("max_steps: 9\ntemperature: 0.5\n")
    study = read(
        base="../base.yaml",
        recipe={"max_steps": 2, "eval_steps": 2, "env": {"B": 3}},
        arms={"a": {"max_steps": 3}, "b": {"recipe": "../other.yaml"}, "c": None},
        per_seed={"model_name_or_path": "bases/{seed:02d}"},
    )
    light = {"save_strategy": "no", "save_model": False}
    by_name = {run.name: run.fields for run in study.runs()}
    common = {"eval_steps": 2, "model_name_or_path": "bases/03", "seed": 3} | light
    env = {"ROLLWISE_TEST_VARIABLE": "1", "B": "3"}
    assert by_name["a/seed-3"] == common | {"learning_rate": 1.0, "max_steps": 3, "env": env}
    assert by_name["b/seed-3"] == common | {"temperature": 0.5, "max_steps": 2, "env": {"B": "3"}}
    assert by_name["c/seed-0"]["model_name_or_path"] == "bases/00"
    assert "ROLLWISE_TEST_VARIABLE" not in os.environ


def test_weights_can_be_kept(read):
    assert read(recipe={"save_model": True}).arms["plain"]["save_model"] is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "(absent)"}, "name is missing"),
        ({"name": "a/b"}, "name is 'a/b'; it names a folder"),
        ({"sedes": [1]}, "unknown key 'sedes'; did you mean 'seeds'?"),
        ({"seeds": []}, r"seeds is \[\]; give at least one"),
        ({"seeds": 5}, "seeds is 5; write a list"),
        ({"seeds": [0, -1]}, r"seeds is \[0, -1\]; .* 0 or more"),
        ({"seeds": [True]}, r"seeds is \[True\]"),
        ({"seeds": [1, 1]}, "give each seed once"),
        ({"arms": {}}, "arms is empty"),
        ({"arms": ["a"]}, r"arms is \['a'\]; write one"),
        ({"arms": {"..": {}}}, "the name of an arm is '..'"),
        ({"arms": {"a": {"seed": 1}}}, "arm a: seed is 1, but the study sets it"),
        ({"arms": {"a": {"recipe": 3}}}, "arm a: the recipe's path is 3"),
        ({"arms": {"a": {"eval_strategy": False}}}, "arm a: eval_strategy is 'no'"),
        ({"recipe": {"output_dir": "x"}}, "recipe: output_dir is 'x', but the study sets it"),
        ({"baseline": "none"}, "baseline is 'none'; name one of the arms: plain, replay"),
        ({"target": 0}, "target is 0; .* above 0 and up to 1"),
        ({"target": "high"}, "target is 'high'"),
        ({"budget_rollouts": [200, 100]}, r"budget_rollouts is \[200, 100\]; .* each larger"),
        ({"budget_rollouts": [0.5]}, "whole numbers above 0"),
        ({"per_seed": {"x": "same"}}, "per_seed: x is 'same'; write a text with {seed} in it"),
        ({"per_seed": {"x": "{seed} {arm}"}}, "cannot be filled in .*only {seed} is known"),
    ],
)
def test_mistakes_are_named_with_the_file(changes, message, read):
    with pytest.raises(ConfigError, match=rf"study\.yaml: .*{message}"):
        read(**changes)


def test_missing_files_are_named(read, tmp_path):
    with pytest.raises(UsageError, match="no study file"):
        read_study(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match=r"no recipe file .*base\.yaml"):
        read(base="base.yaml")
