"""Questions from data: columns of the public data sets, files, sides that are disjoint."""

import json

import datasets
import numpy as np
import pytest
from PIL import Image

from rollwise.errors import ConfigError
from rollwise.tasks.frozen_lake import FrozenLake
from rollwise.tasks.levels import is_held_out, make_environment
from rollwise.tasks.mathematics import Mathematics
from rollwise.tasks.questions import SOURCES, load_questions
from rollwise.tasks.search import SearchQA


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "passages.jsonl"
    path.write_text('{"text": "nothing"}\n')
    return SearchQA(corpus=str(path))


@pytest.fixture
def hub(monkeypatch):
    """Stands for the hub, which tests cannot reach: the data sets that are put in it, by name, config and split."""
    tables = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name=None, *, split: tables[path, name, split])
    return tables


def rows_of(**columns):
    return datasets.Dataset.from_dict(columns)


def test_nq_open(hub, search):
    hub["google-research-datasets/nq_open", None, "train"] = rows_of(
        question=["who wrote it", "when was it", "who wrote it"], answer=[["A", "B"], ["1972"], ["A", "B"]]
    )
    hub["google-research-datasets/nq_open", None, "validation"] = rows_of(
        question=["when was it", "where is it"], answer=[["1972"], ["there"]]
    )
    splits = load_questions(search, "nq_open")
    (train,) = splits["train"]  # once, and without the question that is also held out
    assert json.loads(train["spec"]) == {"question": "who wrote it", "answers": ["A", "B"]}
    assert train["prompt"][1] == {"role": "user", "content": "Question: who wrote it"}
    assert (train["answer"], train["task"]) == ("A", "search_qa")
    assert sorted(json.loads(spec)["question"] for spec in splits["test"]["spec"]) == ["when was it", "where is it"]


def test_gsm8k_and_a_test_side_of_another_name(hub):
    hub["openai/gsm8k", "main", "train"] = rows_of(
        question=["Two and two?", "Half of ten?"], answer=["2+2=<<2+2=4>>4\n#### 4", "10/2\n#### 5,000"]
    )
    hub["openai/gsm8k", "main", "test"] = rows_of(question=["One?"], answer=["#### 1"])
    hub["zwhe99/aime90", None, "2024"] = rows_of(problem=["Find x.", "Find y."], expected_answer=["204", "25"])
    splits = load_questions(Mathematics(), "gsm8k", with_instructions=False, as_messages=False)
    assert dict(zip(splits["train"]["prompt"], splits["train"]["answer"], strict=True)) == {
        "Two and two?\n": "4",
        "Half of ten?\n": "5,000",
    }
    assert splits["test"]["answer"][:] == ["1"]
    splits = load_questions(Mathematics(), "gsm8k", test_source="aime24", num_train=1)
    assert len(splits["train"]) == 1
    assert sorted(splits["test"]["answer"]) == ["204", "25"]
    splits = load_questions(Mathematics(), "aime24", test_source="gsm8k")
    assert (sorted(splits["train"]["answer"]), splits["test"]["answer"][:]) == (["204", "25"], ["1"])


def test_geoqa_has_pictures(hub):
    pictures = [Image.fromarray(np.full((8, 9, 3), value, np.uint8)) for value in (10, 200)]
    for split, value in (("train", 0), ("test", 1)):
        hub["leonardPKU/GEOQA_8K_R1V", None, split] = rows_of(
            images=[[pictures[value]]], problem=["<image>How long is AB?"], answer=[str(value)]
        )
    splits = load_questions(Mathematics(), "geoqa")
    (row,) = splits["test"]
    assert np.asarray(row["images"][0])[0, 0, 0] == 200
    assert row["prompt"][1]["content"] == "How long is AB?"
    assert "images" not in json.loads(row["spec"])


def test_a_file_is_parted_by_a_hash(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question": f"{i} + {i}?", "answers": [2 * i], "difficulty": i % 3}) + "\n" for i in range(200)
        )
    )
    splits = load_questions(Mathematics(), str(path))
    assert len(splits["train"]) + len(splits["test"]) == 200
    assert 10 < len(splits["test"]) < 45
    for side, rows in splits.items():
        assert all(is_held_out(json.loads(spec)) == (side == "test") for spec in rows["spec"])
        assert set(rows["level"]) == {"0", "1", "2"}
    first = load_questions(Mathematics(), str(path), num_train=5, num_test=4, seed=1)
    again = load_questions(Mathematics(), str(path), num_train=5, num_test=4, seed=1)
    other = load_questions(Mathematics(), str(path), num_train=5, num_test=4, seed=2)
    assert first["train"]["prompt_id"][:] == again["train"]["prompt_id"][:] != other["train"]["prompt_id"][:]
    assert first["test"]["prompt_id"][:] == other["test"]["prompt_id"][:]


def test_a_hub_name_of_one_s_own_columns(hub):
    hub["someone/sums", None, "train"] = rows_of(q=["1+1?"], a=["2"])
    splits = load_questions(Mathematics(), "someone/sums", question_column="q", answer_column="a", num_test=0)
    assert splits["test"].num_rows == 0
    with pytest.raises(ConfigError, match=r"no column 'problem' or .* question_column"):
        load_questions(Mathematics(), "someone/sums")


def test_mistakes_are_named(tmp_path, hub):
    with pytest.raises(ConfigError, match=r"levels\.load_dataset"):
        load_questions(FrozenLake(), "gsm8k")
    with pytest.raises(ConfigError, match="choose from nq_open, gsm8k"):
        load_questions(Mathematics(), "gsm9k")
    path = tmp_path / "gaps.jsonl"
    path.write_text('{"problem": "1?", "answer": "1"}\n{"problem": "2?", "answer": ""}\n')
    with pytest.raises(ConfigError, match="'answer' of row 1"):
        load_questions(Mathematics(), str(path))
    path.write_text('{"problem": "1?", "answer": "1"}\n')
    with pytest.raises(ConfigError, match="num_train is 9, but"):
        load_questions(Mathematics(), str(path), num_train=9)


def test_the_paper_s_sets_are_known_by_name():
    assert {"nq_open", "gsm8k", "geoqa", "aime24", "aime25"} <= set(SOURCES)
    assert make_environment("math").name == "math"
