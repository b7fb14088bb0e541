"""Recipes of environments: what they name, what is refused, and what a run leaves."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("trl")
pytest.importorskip("gymnasium")

from rollwise.commands.arguments import parse_arguments
from rollwise.commands.environments import episode_rollouts, load_levels
from rollwise.commands.pretrain import pretrain
from rollwise.commands.sources import load_rewards, model_source
from rollwise.commands.train import train
from rollwise.records.episodes import read_episodes
from rollwise.tasks.imitation import AGENTS
from rollwise.trl.episodes import episode_reward
from rollwise.usage import UsageError

CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
LAKE = CPU | {"environment": "frozen_lake", "environment_levels": ["3x3"], "environment_train_rows": 8}
LAKE |= {"environment_test_rows": 4, "environment_kwargs": {"max_turns": 3, "explain_malformed": False}}


def arguments(tmp_path, flags=(), **fields):
    return parse_arguments(tmp_path / "mine.yaml", fields, ["--output_dir", str(tmp_path / "run"), *flags])


def test_levels_of_both_sides_are_loaded(tmp_path):
    parsed = arguments(tmp_path, **LAKE).train
    train_set, test_set = load_levels(parsed, evaluate=True, seed=0)
    assert (len(train_set), len(test_set)) == (8, 4)
    assert load_levels(parsed, evaluate=False, seed=0)[1] is None
    assert set(train_set["spec"]).isdisjoint(test_set["spec"])
    rollouts = episode_rollouts(parsed)
    assert rollouts.batch.reset([json.loads(train_set["spec"][0])], [0])[0].text.count("\n") == 2


def test_settings_may_be_json_on_the_command_line(tmp_path):
    flags = ["--environment_kwargs", '{"max_turns": 7}', "--max_episode_tokens", "99"]
    parsed = arguments(tmp_path, flags, **LAKE).train
    assert parsed.environment_kwargs == {"max_turns": 7}
    assert episode_rollouts(parsed).max_episode_tokens == 99


def test_embedded_questions_and_the_environments_own_reward(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fields = {"environment": "search_qa", "environment_kwargs": {"corpus": "fictions"}, "dataset_name": "fictions"}
    train_set, test_set = load_levels(arguments(tmp_path, **CPU, **fields).train, evaluate=True, seed=0)
    assert len(train_set) + len(test_set) == 800
    assert (tmp_path / "rollwise" / "fictions" / "corpus.jsonl").is_file()
    assert load_rewards(None, None, "episode") == [episode_reward]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"environment": "frozen_lak"}, "unknown environment 'frozen_lak': choose"),
        ({"environment_kwargs": {"sliperry": True}}, "no setting 'sliperry'"),
        ({"environment_levels": ["4y4"]}, "unknown level '4y4'"),
        ({"environment_test_rows": 0}, "set environment_test_rows to more than 0"),
        ({"environment": "math", "environment_levels": None}, "takes its questions from data: set dataset_name"),
    ],
)
def test_what_does_not_exist_is_refused(tmp_path, fields, message):
    settings = {**LAKE, "environment_kwargs": {}, **fields}
    with pytest.raises(UsageError, match=message):
        load_levels(arguments(tmp_path, **settings).train, evaluate=True, seed=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--environment_kwargs", "slippery"], "is no JSON|which is no JSON"),
        (["--environment_kwargs", "[1]"], "write a mapping such as"),
        (["--environment_train_rows", "0"], "environment_train_rows is 0; it must be more than 0"),
        (["--environment_test_rows", "-1"], "environment_test_rows is -1; it must be 0 or more"),
    ],
)
def test_wrong_values_are_refused(tmp_path, flags, message):
    with pytest.raises(UsageError, match=message):
        arguments(tmp_path, flags, **LAKE)
    with pytest.raises(UsageError, match="max_episode_tokens is set, but no environment"):
        arguments(tmp_path, ["--max_episode_tokens", "99"], **CPU)


def test_a_run_leaves_its_episodes_in_the_report(tmp_path):
    import yaml

    recipe = tmp_path / "mine.yaml"
    steps = {"max_steps": 2, "eval_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4}
    steps |= {"max_completion_length": 3, "num_generations_eval": 2, "save_strategy": "no", "replay_ratio": 1.0}
    steps |= {"replay_warmup_steps": 0, "dataloader_pin_memory": False, "model_name_or_path": "frozen_lake"}
    recipe.write_text(yaml.safe_dump(LAKE | steps | {"output_dir": str(tmp_path / "run")}))
    train(recipe, [])
    episodes = read_episodes(tmp_path / "run" / "episodes.jsonl")
    assert [episode["step"] for episode in episodes] == [0, 0, 0, 2, 2, 2]
    before, after = episodes[:3], episodes[3:]
    assert [e["turns"][0]["text"] for e in before] == [e["turns"][0]["text"] for e in after]  # the same levels
    assert len({episode["turns"][0]["text"] for episode in before}) == 3
    for episode in episodes:
        assert 1 <= len(episode["turns"]) - 1 <= 3
        assert "answer" not in episode["turns"][-1]
        assert episode["reward"] == pytest.approx(sum(turn["reward"] for turn in episode["turns"][:-1]))
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count('class="turn"') == sum(len(episode["turns"]) for episode in episodes)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rollouts_generated"] == 16


def test_pretrain_makes_an_agent_and_says_how_to_use_it(tmp_path, monkeypatch, capsys):
    few = replace(AGENTS["frozen_lake"], num_demonstrations=8, batch_size=4)
    monkeypatch.setitem(AGENTS, "frozen_lake", few)
    pretrain(tmp_path / "agent", task="frozen_lake", steps=2)
    assert json.loads((tmp_path / "agent" / "pretrain.json").read_text("utf-8"))["steps"] == 2
    shown = capsys.readouterr().out
    assert "imitating them (loss " in shown
    assert "--model_name_or_path" in shown
    with pytest.raises(UsageError, match="unknown task 'frozen_lak'.*choose arithmetic, frozen_lake"):
        pretrain(tmp_path / "agent", task="frozen_lak")


def test_the_embedded_agents_are_known_by_name():
    assert model_source("frozen_lake").endswith("assets/frozen_lake")
