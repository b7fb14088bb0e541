import json
import sys

import pytest

from rollwise.commands.arguments import TrainArguments
from rollwise.commands.sources import load_problems, load_rewards, model_source
from rollwise.errors import ConfigError
from rollwise.tasks import agents, arithmetic
from rollwise.usage import UsageError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def load(evaluate=True, seed=0, **fields):
    return load_problems(TrainArguments(**fields), evaluate=evaluate, seed=seed)


ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_embedded_problems():
    train, test = load(arithmetic_train_problems=40, arithmetic_test_problems=10, arithmetic_levels=["sort-4"])
    assert (len(train), len(test)) == (40, 10)
    assert set(train["level"]) == {"sort-4"}
    again, same = load(arithmetic_train_problems=40, arithmetic_test_problems=10, arithmetic_data_seed=1)
    assert again["prompt"] != train["prompt"]
    assert len(same) == 10


def test_no_held_out_problems():
    with pytest.raises(UsageError, match="no held-out problems: give it some, or measure nothing with --eval_str"):
        load(arithmetic_test_problems=0)
    assert load(arithmetic_test_problems=0, evaluate=False)[1] is None


def test_an_unknown_level_is_refused():
    with pytest.raises(UsageError, match="unknown level 'sort-99'"):
        load(arithmetic_levels=["sort-99"])


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_a_file_by_its_path(suffix, tmp_path):
    from datasets import Dataset

    path = tmp_path / f"problems.{suffix}"
    data = Dataset.from_list(ROWS)
    {"csv": data.to_csv, "parquet": data.to_parquet}.get(suffix, lambda p: write_jsonl(p))(path)
    train, test = load(dataset_name=str(path), dataset_test_rows=5)
    assert (len(train), len(test)) == (15, 5)
    assert {*train["prompt"], *test["prompt"]} == {row["prompt"] for row in ROWS}
    assert load(dataset_name=str(path), dataset_test_rows=5)[1]["prompt"] == test["prompt"]
    assert load(dataset_name=str(path), dataset_test_rows=5, seed=1)[1]["prompt"] != test["prompt"]


def test_a_folder_with_splits(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl")
    write_jsonl(folder / "test.jsonl", ROWS[:3])
    train, test = load(dataset_name="data")
    assert (len(train), len(test)) == (20, 3)


def test_a_folder_that_save_to_disk_wrote(tmp_path):
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    train, test = load(dataset_name="saved", evaluate=False)
    assert len(train) == 20
    assert test is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset_name": "missing.jsonl"}, "no data file 'missing.jsonl'"),
        ({"dataset_name": "e.jsonl"}, "data file 'e.jsonl' has no rows: give it at least one"),
        ({"dataset_name": "emptied"}, "data set 'emptied' has no rows: give it at least one"),
        ({"dataset_name": "e.csv"}, "data set 'e.csv' cannot be loaded"),
        ({"dataset_name": "e.parquet"}, "data set 'e.parquet' cannot be loaded"),
        ({"dataset_name": "no/such-data"}, "data set 'no/such-data' cannot be loaded"),
        ({"dataset_name": "p.jsonl"}, r"no split 'test' \(it has train\): .*--dataset_test_rows 200"),
        ({"dataset_name": "p.jsonl", "dataset_train_split": "tr"}, r"no split 'tr' \(it has train\)"),
        ({"dataset_name": "p.jsonl", "dataset_test_rows": 20}, "dataset_test_rows is 20, but 'p.jsonl' has 20 rows"),
        ({"dataset_name": "q.jsonl", "dataset_test_rows": 1}, r"no column 'prompt' \(it has question\)"),
    ],
)
def test_mistakes_in_the_data(fields, message, tmp_path):
    (tmp_path / "emptied").mkdir()
    for name in ("e.jsonl", "e.csv", "e.parquet", "emptied/train.jsonl"):
        (tmp_path / name).touch()
    write_jsonl(tmp_path / "p.jsonl")
    write_jsonl(tmp_path / "q.jsonl", [{"question": "1+1="}] * 3)
    with pytest.raises(UsageError, match=message) as error:
        load(**fields)
    assert "\n" not in str(error.value)


def test_rewards_by_name():
    assert load_rewards(None, None, "arithmetic") == [arithmetic.exact_match_reward]
    assert load_rewards(["arithmetic"], "a/reward-model", "x.jsonl") == [
        "a/reward-model",
        arithmetic.exact_match_reward,
    ]
    [think] = load_rewards(["think_format_reward"], None, "x.jsonl")
    assert think([[{"content": "<think>\na\n</think>\nb"}], [{"content": "c"}]]) == [1.0, 0.0]
    [overlong] = load_rewards(["get_soft_overlong_punishment"], None, "x.jsonl")
    assert overlong([[0]]) == [0.0]


def test_a_reward_of_ones_own_is_found_in_the_current_folder(tmp_path):
    (tmp_path / "own_rewards_a.py").write_text(
        "def short(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    [reward] = load_rewards(["own_rewards_a.short"], None, "x.jsonl")
    assert reward(["a", "b"]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            None,
            r"no reward for data set 'x.jsonl': set reward_funcs to one or more of arithmetic, math, episode",
        ),
        (["acuracy_reward"], r"unknown reward 'acuracy_reward'; did you mean 'accuracy_reward'\?; choose from"),
        (["no_such_module_b.f"], "no module 'no_such_module_b'"),
        (["own_rewards_b.shrot"], r"no function 'shrot' in own_rewards_b \(it has short\)"),
        (["own_rewards_c.f"], "own_rewards_c itself needs 'no_such_module_c', which is missing"),
    ],
)
def test_mistakes_in_the_rewards(names, message, tmp_path):
    (tmp_path / "own_rewards_b.py").write_text("def short(completions, **kwargs):\n    return []\n")
    (tmp_path / "own_rewards_c.py").write_text("import no_such_module_c\n")
    with pytest.raises(UsageError, match=message) as error:
        load_rewards(names, None, "x.jsonl")
    assert "\n" not in str(error.value)


def test_models(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.setattr(arithmetic, "model_path", lambda: tmp_path / "embedded")
    assert model_source("arithmetic") == str(tmp_path / "embedded")
    assert model_source("m") == "m"
    assert model_source("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./missing", "no model folder './missing'"),
        ("a/b/c", "no model folder 'a/b/c'"),
        ("empty", "model folder 'empty' holds no config.json"),
    ],
)
def test_mistakes_in_the_model(name, message, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=message):
        model_source(name)


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_a_missing_embedded_model_says_how_to_make_it(name, monkeypatch, tmp_path):
    for module in (arithmetic, agents):
        monkeypatch.setattr(module.resources, "files", lambda package: tmp_path)
    with pytest.raises(ConfigError, match="rollwise pretrain OUTPUT_DIR"):
        model_source(name)
