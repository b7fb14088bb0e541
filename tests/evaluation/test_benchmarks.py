import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollwise.errors import ConfigError
from rollwise.evaluation import benchmarks
from rollwise.evaluation.benchmarks import HUB_BENCHMARKS, canonical, load_benchmark

ROWS = {
    "math500": {"problem": ["1+1?"], "answer": ["2"], "unique_id": ["test/a/1.json"], "level": [3]},
    "aime24": {"problem": ["1+1?"], "expected_answer": ["2"]},
    "aime25": {"problem_idx": [1], "problem": ["1+1?"], "answer": [2]},
    "aime26": {"problem_idx": [1], "problem": ["1+1?"], "answer": [2]},
    "hmmt_feb25": {"problem_idx": [1], "problem": ["1+1?"], "answer": ["2"]},
    "hmmt_feb26": {"problem_idx": [1], "problem": ["1+1?"], "answer": ["2"]},
    "amc23": {"question": ["1+1?"], "answer": [2.0]},
    "minerva": {"question": ["1+1?"], "answer": ["2"]},
    "olympiadbench": {"id": [1606], "question": ["1+1?"], "final_answer": [["2", "3"]]},
}


@pytest.mark.parametrize("name", HUB_BENCHMARKS)
def test_each_public_benchmark_is_read_from_its_split_and_columns(name, tmp_path, monkeypatch):
    """A folder of the hub's layout, read by `datasets` as the hub would be."""
    place = HUB_BENCHMARKS[name]
    folder = tmp_path / "hub" / (place.config or "data")
    folder.mkdir(parents=True)
    pq.write_table(pa.table(ROWS[name]), folder / f"{place.split}-00000-of-00001.parquet")
    config = place.config or "default"
    (tmp_path / "hub" / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n  - split: '{place.split}'\n"
        f"    path: {folder.name}/{place.split}-*\n---\n"
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(HUB_BENCHMARKS, name, replace(place, hub=str(tmp_path / "hub")))
    found = load_benchmark(name)
    assert (found.name, found.verifier) == (name, "math")
    assert "\\boxed{}" in found.instruction
    (problem,) = found.problems
    assert (problem.problem, problem.answer) == ("1+1?", "2")
    expected_ids = {"math500": "test/a/1.json", "olympiadbench": "1606", "aime24": "0", "amc23": "0", "minerva": "0"}
    assert problem.problem_id == expected_ids.get(name, "1")
    assert problem.level == ("3" if name == "math500" else None)


def test_names_are_forgiving():
    assert canonical("MATH-500") == "math500"
    assert canonical("HMMT Feb 25") == "hmmt_feb25"
    assert canonical("nothing") == "nothing"


def test_the_embedded_task_is_the_held_out_problems():
    found = load_benchmark("arithmetic", limit=20)
    assert (len(found.problems), found.verifier, found.instruction, found.max_tokens) == (20, "exact", "", 10)
    assert len({problem.problem_id for problem in found.problems}) == 20
    assert found.problems[0].level


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_local_files(tmp_path, suffix):
    rows = [{"question": "a?", "final_answer": "1"}, {"question": "b?", "final_answer": "2"}]
    path = tmp_path / f"mine.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    found = load_benchmark(str(path))
    assert (found.name, found.verifier) == ("mine", "math")
    assert [(p.problem_id, p.problem, p.answer) for p in found.problems] == [("0", "a?", "1"), ("1", "b?", "2")]
    assert len(load_benchmark(str(path), limit=1).problems) == 1


def test_other_columns_can_be_named(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "a?", "right": 3.0, "problem": "no"}\n')
    (problem,) = load_benchmark(str(path), problem_column="text", answer_column="right").problems
    assert (problem.problem, problem.answer) == ("a?", "3")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no problems"),
        ('{"a": 1}', r"no column 'problem' or 'question' or 'prompt' \(it has a\): .* --problem-column"),
        ('{"problem": "a?"}', "no column 'answer'"),
        ('{"problem": "a?", "answer": null}', "nothing in column 'answer' of row 0"),
        ('{"problem": "a?", "answer": []}', "nothing in column 'answer' of row 0"),
        ('{"id": 1, "problem": "a", "answer": 1}\n{"id": 1, "problem": "b", "answer": 1}', "the id '1' twice"),
        ("{", "cannot be read"),
        ("[1]", "must hold objects"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path, content, words):
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        load_benchmark(str(path))


def test_unknown_benchmarks_are_named():
    with pytest.raises(ConfigError, match=r"unknown benchmark 'gsm': choose from arithmetic, math500"):
        load_benchmark("gsm")
    with pytest.raises(ConfigError, match="no benchmark file"):
        load_benchmark("absent.jsonl")
    with pytest.raises(ConfigError, match="limit is 0"):
        load_benchmark("arithmetic", limit=0)
    assert "olympiadbench" in benchmarks.choices()
