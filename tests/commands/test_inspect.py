import io
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from rollwise import PilotCommit, Replay, Rollout, RolloutScheduler, StateError
from rollwise.commands.inspect import inspect
from rollwise.storage import save_state
from rollwise.tasks.arithmetic import model_path
from rollwise.usage import UsageError


@pytest.fixture
def run_folder(tmp_path):
    """A run's folder with two checkpoints; in the newer one, after step 3, rollouts of ages 0 to 3 are stored."""
    scheduler = RolloutScheduler(
        range(40),
        allocation=PilotCommit(train_prompts=2, pilot_rollouts=2, commit_rollouts=2, solved_prompts="remove"),
        replay=Replay(warmup_steps=0),
    )
    for step in range(4):
        while requests := scheduler.ask():
            scheduler.tell(
                [
                    Rollout(r.prompt_id, float((r.prompt_id + i) % 3 > 0), {"prompt_ids": np.arange(3)}, num_tokens=5)
                    for r in requests
                    for i in range(r.num_rollouts)
                ]
            )
        scheduler.batch()
        if step in (1, 3):
            save_state(tmp_path / f"checkpoint-{step + 1}", scheduler.state_dict())
    return tmp_path, scheduler


def shown(*args, **kwargs):
    console = Console(file=io.StringIO(), width=120)
    inspect(*args, console=console, **kwargs)
    return console.file.getvalue()


def test_the_newest_checkpoint_as_json(run_folder):
    folder, scheduler = run_folder
    found = json.loads(shown(folder, as_json=True, top=3))
    stored = scheduler.buffer.rollouts
    assert found["checkpoint"].endswith("checkpoint-4")
    assert found["step"] == 3
    assert found["stored_rollouts"] == len(stored) > 0
    assert found["stored_bytes"] == 24 * len(stored)
    assert found["ledger"] == scheduler.ledger.totals()
    assert sum(found["rollouts_by_age"].values()) == len(stored)
    assert set(found["rollouts_by_age"]) <= {"0", "1", "2", "3"}
    assert found["stored_positive_share"] == np.mean([rollout.advantage > 0 for rollout in stored])
    largest = sorted((abs(rollout.advantage) for rollout in stored), reverse=True)[:3]
    assert [abs(row["advantage"]) for row in found["top"]] == largest


def test_an_older_checkpoint_by_name(run_folder):
    folder, _ = run_folder
    assert json.loads(shown(folder / "checkpoint-2", as_json=True))["step"] == 1


def test_tables_hold_the_numbers(run_folder):
    folder, scheduler = run_folder
    text = shown(folder)
    totals = scheduler.ledger.totals()
    for number in (len(scheduler.buffer), totals["rollouts_generated"], totals["rows_replayed"]):
        assert f"{number:,}" in text
    assert "stored rollouts by age" in text


def test_every_stored_rollout_as_parquet(run_folder, tmp_path_factory):
    folder, scheduler = run_folder
    path = tmp_path_factory.mktemp("out") / "buffer.parquet"
    shown(folder, parquet=path)
    rows = pq.read_table(path).to_pylist()
    assert sorted(row["prompt_id"] for row in rows) == sorted(r.prompt_id for r in scheduler.buffer.rollouts)
    assert all(row["age_steps"] == 3 - row["birth_step"] for row in rows)


def test_an_empty_buffer(tmp_path):
    scheduler = RolloutScheduler(range(3))
    save_state(tmp_path, scheduler.state_dict())
    assert json.loads(shown(tmp_path, as_json=True))["stored_rollouts"] == 0
    assert "uniform" in shown(tmp_path)


def test_texts_of_a_checkpoint_of_verl(tmp_path):
    """Rows without padding, one after the other; the tokenizer is where verl has it."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    tokenizer.save_pretrained(tmp_path / "global_step_2" / "actor" / "huggingface")
    texts = [("1+2=", ["3"]), ("2+2=", ["5", "4"])]  # the second began its context anew
    rollouts = []
    for i, (prompt, completions) in enumerate(texts):
        ids = [np.array(tokenizer(text, add_special_tokens=False).input_ids) for text in (prompt, *completions)]
        prompts = [ids[0], *(np.array([1, 2, 3]) for _ in completions[1:])]
        payload = {
            "prompt_lengths": np.array([len(row) for row in prompts]),
            "response_lengths": np.array([len(row) for row in ids[1:]]),
            "prompt_ids": np.concatenate(prompts),
            "response_ids": np.concatenate(ids[1:]),
        }
        rollouts.append(Rollout(i, 1.0, payload, advantage=1.0 + i, birth_step=0, num_tokens=1))
    scheduler = RolloutScheduler(range(2), replay=Replay(warmup_steps=0))
    scheduler.buffer.insert(rollouts)
    # As its sharded store leaves them: one file a shard.
    for rank, rollout in enumerate(rollouts):
        rollout.owner = rank
    for rank in range(2):
        save_state(tmp_path / "global_step_2" / "rollwise", scheduler.state_dict(), rank=rank, world_size=2)
    for folder in (tmp_path, tmp_path / "global_step_2", tmp_path / "global_step_2" / "rollwise"):
        top = json.loads(shown(folder, as_json=True))["top"]
        assert [(row["prompt"], row["completion"]) for row in top] == [("2+2=", "5\n4"), ("1+2=", "3")]
    assert "'2+2='" in shown(tmp_path)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UsageError, match="is no folder"):
        inspect(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="holds no checkpoint.*--save_strategy steps"):
        inspect(tmp_path)
    (tmp_path / "rollwise-00000-of-00001.arrow").write_bytes(b"garbage")
    with pytest.raises(StateError, match="rollwise-00000-of-00001.arrow"):
        inspect(tmp_path)


def test_shares_are_the_chances_of_the_next_draw(run_folder):
    folder, scheduler = run_folder
    found = json.loads(shown(folder, as_json=True, top=1000))
    weights = np.array([(abs(row["advantage"]) + 1e-6) ** 0.5 for row in found["top"]])
    assert [row["draw_share"] for row in found["top"]] == pytest.approx(weights / weights.sum())
    assert {row["num_uses"] for row in found["top"]} == {r.num_uses for r in scheduler.buffer.rollouts}
    assert "stored rollouts that are drawn most" in shown(folder)


def test_a_priority_of_ones_own_is_not_guessed(tmp_path):
    def priority(rollouts):
        return np.ones(len(rollouts))

    scheduler = RolloutScheduler(range(5), replay=Replay(priority=priority))
    while requests := scheduler.ask():
        scheduler.tell([Rollout(r.prompt_id, float(i % 2)) for r in requests for i in range(r.num_rollouts)])
    for rollout in (rollouts := [Rollout(0, 1.0, {"prompt_ids": np.arange(2)}) for _ in range(3)]):
        rollout.advantage, rollout.birth_step = 1.0, 0
    scheduler.batch()
    scheduler.buffer.insert(rollouts)
    save_state(tmp_path / "checkpoint-1", scheduler.state_dict())
    found = json.loads(shown(tmp_path, as_json=True, top=2))
    assert [row["draw_share"] for row in found["top"]] == [None, None]
    assert "stored rollouts of the largest |advantage|" in shown(tmp_path)
