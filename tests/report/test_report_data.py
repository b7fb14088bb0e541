import json
import os
import time

import numpy as np
import pytest
from report_helpers import leave_run, leave_study_run, ledger, metrics

from rollwise.records.metrics import ACCURACY
from rollwise.report.curves import thin
from rollwise.report.data import gather
from rollwise.report.runs import RunData, read_source
from rollwise.report.steps import binned
from rollwise.usage import UsageError


def test_a_run_by_hand(tmp_path):
    data = gather([leave_run(tmp_path / "mine")])
    assert data["title"] == "mine"
    assert data["baseline"] is None
    assert not data["has_target"]
    assert data["ends"]["mine"] == {"value": 0.5, "low": None, "high": None, "num_seeds": 1}
    curve = data["curves"]["rollouts"]["mine"]
    assert curve["x"] == [0, 1000, 2000]
    assert curve["y"] == pytest.approx([0.2, 0.35, 0.5])
    assert curve["low"] == []
    assert data["curves"]["seconds"]["mine"]["x"] == [0, 20, 40]
    assert data["curves"]["tokens"]["mine"]["x"] == [0, 10_000, 20_000]
    assert data["waste"]["mine"] == {
        **{"runs": 1, "generated": 2000, "replayed": 600},
        "outcomes": {"trained": 1200, "zero_variance": 600, "too_hard": 200},
    }
    assert data["going"] == data["failed"] == data["samples"] == []
    assert data["settings"] == data["lengths"] == {}


def test_details_by_hand(tmp_path):
    found = gather([leave_run(tmp_path / "mine")])["details"]["mine"]
    assert found["waste"]["edges"] == list(range(21))
    assert found["waste"]["outcomes"] == {"trained": [60.0] * 20, "zero_variance": [30.0] * 20, "too_hard": [10.0] * 20}
    assert found["waste"]["replayed"] == [30.0] * 20
    assert found["pool"]["live prompts"]["y"] == [1000 - step for step in range(1, 21)]
    assert found["waiting"]["survivors waiting"]["y"] == [5] * 20
    assert found["ages"]["largest age"]["y"] == [9] * 20
    assert list(found["ess"]["rows"]) == ["0", "1", "2-3", "4-7"]
    assert found["ess"]["rows"]["4-7"] == [None] + [0.7] * 20


def test_long_runs_are_thinned_without_losing_rollouts(tmp_path):
    data = gather([leave_run(tmp_path / "mine", steps=1000)])
    found = data["details"]["mine"]["waste"]
    widths = np.diff(found["edges"])
    assert len(widths) == 60
    assert sum(np.array(found["outcomes"]["trained"]) * widths) == pytest.approx(60_000)
    for curves in data["training"]:
        assert len(curves["arms"]["mine"]["x"]) <= 400
    assert thin(range(10), 4) == [0, 3, 6, 9]
    assert thin([1, 2], 4) == [1, 2]


def test_binned_values_are_means_over_steps_and_runs(tmp_path):
    def run(values):
        columns = {"step": np.arange(1.0, len(values) + 1), "a": np.array(values)}
        return RunData(tmp_path, "r", "r", 0, "finished", columns=columns)

    group = [run([1.0, 3.0, np.nan, 5.0]), run([2.0, 4.0, np.nan, 7.0])]
    assert binned(group, "a", 100) == {"x": [1, 2, 4], "y": [1.5, 3.5, 6]}
    assert binned(group, "b", 2) is None


def test_seeds_are_one_method_with_an_interval(tmp_path):
    folders = [leave_run(tmp_path / f"grpo-seed{s}", seed=s, ends=0.5 + s / 10) for s in range(3)]
    other = leave_run(tmp_path / "replay", seed=0, settings={"replay_ratio": 1.0}, ends=0.7)
    data = gather([*folders, other])
    assert [arm["name"] for arm in data["arms"]] == ["grpo", "replay"]
    assert data["baseline"] == "grpo"
    end = data["ends"]["grpo"]
    assert (end["value"], end["num_seeds"]) == (pytest.approx(0.6), 3)
    assert end["low"] < 0.6 < end["high"]
    curve = data["curves"]["rollouts"]["grpo"]
    assert curve["y"][-1] == pytest.approx(0.6)
    assert (curve["low"][-1], curve["high"][-1]) == (end["low"], end["high"])
    assert data["settings"] == {"replay_ratio": {"grpo": "-", "replay": "1"}}
    # the smallest peak mean is grpo's .6: seed 2 gets there at 2000, the others never do; replay at 2000
    assert data["summary"]["target"] == pytest.approx(0.6)
    assert data["summary"]["arms"]["grpo"]["rollouts_to_target"]["bound"] == ">="
    assert data["summary"]["arms"]["replay"]["rollouts_to_target"]["value"] == 2000


def test_the_same_run_twice_is_not_taken_for_two_seeds(tmp_path):
    data = gather([leave_run(tmp_path / "a"), leave_run(tmp_path / "b")])
    assert [arm["name"] for arm in data["arms"]] == ["a", "b"]


def test_a_study_with_a_run_that_is_going(tmp_path):
    study = tmp_path / "study"
    for number, (arm, seed) in enumerate([("plain", 0), ("better", 0), ("plain", 1)]):
        folder = leave_study_run(study, arm, seed, ends=0.5 if arm == "plain" else 0.6)
        os.utime(folder / "run.json", (number, number))
    rows = metrics(8, eval_every=4)
    leave_study_run(study, "better", 1, done=False, rows=rows, steps=20)
    data = gather([study])
    assert [arm["name"] for arm in data["arms"]] == ["plain", "better"]
    assert data["sources"] == [{"path": str(study), "kind": "study", "runs": 4, "ended": 3}]
    assert data["summary"]["arms"]["better"]["seeds"] == [0]
    assert data["summary"]["arms"]["better"]["rollouts_ratio"]["value"] == 1
    (going,) = data["going"]
    assert going["name"] == "better/seed-1"
    assert (going["step"], going["max_steps"], going["share"]) == (8, 20, 0.4)
    assert going["seconds_left"] == pytest.approx(16 * 0.6 / 0.4)
    assert going["accuracy"] == 0.5
    assert data["curves"]["rollouts"]["better"]["runs"] == 1, "a run that is going does not cut its arm's curve short"


def test_a_studys_summary_says_how_to_compare(tmp_path):
    study = tmp_path / "study"
    for arm in ("a", "b"):
        leave_study_run(study, arm, 0)
    summary = {"baseline": "b", "target": 0.3, "target_is_default": False, "budget_rollouts": [500]}
    (study / "summary.json").write_text(json.dumps(summary))
    data = gather([study])
    assert (data["baseline"], data["summary"]["target"]) == ("b", 0.3)
    assert data["summary"]["budget_rollouts"] == [500]
    assert data["summary"]["arms"]["a"]["rollouts_to_target"]["value"] == 1000
    assert gather([study], baseline="a", target=0.4)["summary"]["target"] == 0.4
    with pytest.raises(UsageError, match=r"no arm 'c'.*there are a, b|no arm 'c'.*there are b, a"):
        gather([study], baseline="c")
    with pytest.raises(UsageError, match=r"target is 1\.5"):
        gather([study], target=1.5)


def test_arms_of_several_studies_are_told_apart(tmp_path):
    for study in ("one", "two"):
        leave_study_run(tmp_path / study, "grpo", 0)
    data = gather([tmp_path / "one", tmp_path / "two"])
    assert [arm["name"] for arm in data["arms"]] == ["one: grpo", "two: grpo"]


def test_a_run_that_is_going_has_curves_and_counts_so_far(tmp_path):
    rows = metrics(13)
    data = gather([leave_run(tmp_path / "mine", steps=50, status="running", rows=rows)])
    assert data["summary"] is None
    assert not data["has_target"]
    (going,) = data["going"]
    assert (going["step"], going["share"], going["rollouts"]) == (13, 0.26, 1300)
    assert data["curves"]["rollouts"]["mine"]["going"]
    assert data["waste"]["mine"]["outcomes"] == {"trained": 780, "wasted": 520}


def test_a_budget_of_rollouts_says_how_far_a_run_is(tmp_path):
    settings = {"max_steps": 100, "budget_rollouts": 2000}
    folder = leave_run(tmp_path / "mine", status="running", rows=metrics(10), settings=settings)
    (going,) = gather([folder])["going"]
    assert going["share"] == 0.5


def test_a_run_that_has_just_begun(tmp_path):
    folder = leave_run(tmp_path / "mine", status="running", rows=[])
    (folder / "metrics.jsonl").unlink()
    then = time.time() - 100
    os.utime(folder / "summary.json", (then, then))
    (going,) = gather([folder])["going"]
    assert (going["step"], going["accuracy"], going["share"], going["seconds_left"]) == (0, None, 0, None)
    assert going["idle_seconds"] >= 99


def test_a_line_cut_off_and_rows_of_nothing_known_are_passed_over(tmp_path):
    folder = leave_run(tmp_path / "mine")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21}\n[1]\n{"step": 22, "sec')
    assert gather([folder])["curves"]["rollouts"]["mine"]["x"] == [0, 1000, 2000]


def test_a_failed_run_is_listed_and_not_compared(tmp_path):
    bad = leave_run(tmp_path / "bad", status="failed", settings={"learning_rate": 1.0})
    data = gather([leave_run(tmp_path / "good"), bad])
    assert list(data["summary"]["arms"]) == ["good"]
    assert [run["name"] for run in data["failed"]] == ["bad"]


def test_many_runs_that_ended_alike_are_counted(tmp_path):
    folders = [leave_run(tmp_path / f"run-{i}", status="failed") for i in range(4)]
    stopped = leave_run(tmp_path / "stopped", status="stopped")
    summary = json.loads((stopped / "summary.json").read_text())
    (stopped / "summary.json").write_text(json.dumps(summary | {"stop_reason": "all prompts are solved"}))
    assert gather([*folders, stopped])["failed"] == [
        {"name": "4 runs", "status": "failed", "reason": ""},
        {"name": "stopped", "status": "stopped", "reason": "all prompts are solved"},
    ]


def test_missing_pieces_leave_their_parts_out(tmp_path):
    rows = [row for row in metrics(20, replay=False, pool=False) if ACCURACY not in row]
    folder = leave_run(tmp_path / "mine", rows=rows)
    (folder / "ledger.parquet").unlink()
    data = gather([folder])
    assert data["curves"] == {}
    assert data["summary"] is None
    assert data["details"] == {}
    assert data["waste"]["mine"]["outcomes"] == {"trained": 1200, "wasted": 800}


def test_the_baseline_that_a_run_left_is_compared_with(tmp_path):
    folder = leave_run(tmp_path / "mine", ends=0.6, settings={"allocation": "pilot_commit"})
    leave_run(folder / "baseline", ends=0.6, steps=40)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"baseline": {"target": 0.55}}))
    data = gather([folder])
    assert data["baseline"] == "mine: plain GRPO"
    assert data["summary"]["target"] == 0.55
    assert data["summary"]["arms"]["mine"]["rollouts_ratio"]["value"] == 2


def test_wrong_folders_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(UsageError, match="no folder"):
        read_source(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="is a file; name the folder"):
        read_source(file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"neither a run \(summary.json, metrics.jsonl\) nor a study"):
        read_source(tmp_path / "empty")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "study.lock").write_text("")
    with pytest.raises(UsageError, match="without a run yet"):
        read_source(tmp_path / "begun")
    leave_run(tmp_path / "runs" / "a")
    leave_run(tmp_path / "runs" / "b")
    with pytest.raises(UsageError, match="2 lie in it: name them, rollwise report .*a .*b"):
        read_source(tmp_path / "runs")


def test_a_run_or_an_arm_of_a_study_can_be_named(tmp_path):
    done = leave_study_run(tmp_path / "study", "a", 0)
    going = leave_study_run(tmp_path / "study", "a", 1, done=False)
    assert [run.status for run in read_source(tmp_path / "study" / "a").runs] == ["finished", "running"]
    assert read_source(done).runs[0].name == "a/seed-0"
    assert read_source(going).runs[0].status == "running"


def test_logged_completions_give_samples_and_lengths(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = leave_run(tmp_path / "mine")
    (folder / "completions").mkdir()
    for step in range(3):
        rows = [
            {"step": step, "prompt": "p", "completion": "x" * size, "my_reward": reward, "advantage": reward or 0.0}
            for size, reward in ((4, 1.0), (6, 1.0), (10, 0.0), (99, None))
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "completions" / f"completions_{step:05d}.parquet")
    data = gather([folder])
    found = data["lengths"]["mine"]
    assert found["unit"] == "characters"
    assert [(row["label"], row["count"], row["mean"]) for row in found["table"]] == [("right", 6, 5), ("wrong", 3, 10)]
    assert found["lines"]["right"] == {"x": [0, 1, 2], "y": [5, 5, 5]}
    (sample,) = data["samples"]
    assert [(row["completion"], row["right"]) for row in sample["rows"]] == [
        ("xxxx", True),
        ("xxxxxx", True),
        ("x" * 10, False),
    ]
    assert gather([folder], samples=False)["samples"] == []


def test_a_damaged_checkpoint_costs_its_samples_alone(tmp_path):
    folder = leave_run(tmp_path / "mine")
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "rollwise-00000-of-00001.arrow").write_bytes(b"no arrow")
    (sample,) = gather([folder])["samples"]
    assert sample["rows"] == []
    assert "cannot be read" in sample["source"]


def test_many_arms_are_ordered_and_few_of_them_in_colour(tmp_path):
    folders = [leave_run(tmp_path / f"arm{i}", settings={"learning_rate": i}, ends=0.9 - i / 50) for i in range(12)]
    arms = gather(folders[::-1], baseline="arm9", target=0.7)["arms"]
    assert arms[0]["name"] == "arm9"
    assert sum(arm["lit"] for arm in arms) == 8
    assert {arm["name"] for arm in arms[-1:]} == {"arm10"} or arms[-1]["name"] == "arm11"


def test_the_ledger_of_the_helper_is_one():
    assert ledger(2).totals()["rollouts_generated"] == 200


PNG = "data:image/png;base64,iVBORw0KGgo="


def leave_episodes(folder, steps=(0, 10, 20, 30), images=(PNG,), turns=3):
    rows = []
    for step in steps:
        for number in range(2):
            shown = [
                {"text": f"map {turn}", "images": list(images), "answer": f"move {turn}", "reward": 0.0}
                for turn in range(turns)
            ]
            shown.append({"text": "the end", "images": list(images)})
            rows.append({"step": step, "reward": float(number), "success": bool(number), "turns": shown})
            rows[-1] |= {"ended_by": "max_turns", "unscored": None}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "episodes.jsonl").write_text(text + '{"step": 30, "tur', encoding="utf-8")


def test_episodes_of_the_first_a_middle_and_the_last_evaluation(tmp_path):
    folder = leave_run(tmp_path / "mine")
    leave_episodes(folder)
    (found,) = gather([folder])["episodes"]
    assert [row["step"] for row in found["rows"]] == [0, 0, 20, 20, 30, 30]
    assert [row["success"] for row in found["rows"]] == [False, True] * 3
    turns = found["rows"][0]["turns"]
    assert [(turn["text"], turn["answer"]) for turn in turns[-2:]] == [("map 2", "move 2"), ("the end", None)]
    assert turns[0]["images"] == [PNG]
    assert gather([folder], samples=False)["episodes"] == []


def test_pictures_of_episodes_are_bounded_and_nothing_else_than_pictures(tmp_path):
    folder = leave_run(tmp_path / "mine")
    leave_episodes(folder, images=[PNG, "javascript:alert(1)", 'data:image/png;base64,"><script>'])
    (found,) = gather([folder])["episodes"]
    assert {image for row in found["rows"] for turn in row["turns"] for image in turn["images"]} == {PNG}
    large = PNG[:-1] + "A" * 200_000
    leave_episodes(folder, images=[large], turns=60)
    (found,) = gather([folder])["episodes"]
    shown = [turn for row in found["rows"] for turn in row["turns"]]
    assert sum(len(image) for turn in shown for image in turn["images"]) < 1_500_000
    assert shown[0]["images"]
    assert shown[-1]["left_out"] == 1
    assert found["rows"][0]["left_out"] == 61 - 40
