"""Nothing is lost: a run that goes on from a checkpoint does what the run did that went on at once.

Also with another number of agent loop workers, and with the rows in shards where they were on the driver.
"""

import shutil

import decisions
import pytest
import torch
from launch import launch
from safetensors.torch import load_file

from rollwise.storage import load_state

SAVED = 2


@pytest.fixture(scope="module")
def resumed(whole):
    """From the checkpoint of step 2, with all that came later taken away, as if the machine had lost power."""
    folder = whole.folder.parent
    checkpoints = folder / "lost-power"
    shutil.copytree(folder / "checkpoints" / f"global_step_{SAVED}", checkpoints / f"global_step_{SAVED}")
    # Of a checkpoint that was being written there is a part, and nothing says that it is there.
    shutil.copytree(checkpoints / f"global_step_{SAVED}" / "rollwise", checkpoints / "global_step_4" / "rollwise")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    run = launch(
        folder,
        "resumed",
        *decisions.verl_overrides(),
        "trainer.save_freq=2",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={checkpoints}",
        "rollwise.payload_store=sharded",
        "rollwise.payload_shards=3",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        env={
            "VERL_ON_CPU_REWARDS": "decisions",
            "DECISIONS_FROM": str(whole.folder / "events.jsonl"),
            "DECISIONS_STEPS": str(SAVED),
        },
        **decisions.verl_settings(),
    )
    assert run.exit_code == 0, run.output[-5000:]
    return run


def decided(events, kind):
    """Requests, or rows without their numbers, which count from the process's start."""
    if kind == "ask":
        return [(event["step"], event["requests"]) for event in events if event["kind"] == "ask"]
    return [
        (
            event["step"],
            [
                [row[name] for name in ("prompt", "reward", "birth_step", "source", "advantage")]
                for row in event["rows"]
            ],
        )
        for event in events
        if event["kind"] == "batch"
    ]


def test_the_resumed_run_asks_and_draws_as_the_run_that_went_on(whole, resumed):
    for kind in ("ask", "batch"):
        expected = [event for event in decided(whole.events, kind) if event[0] >= SAVED]
        assert decided(resumed.events, kind) == expected
    assert any(row[3] == "replay" for _, rows in decided(resumed.events, "batch") for row in rows)
    assert [step["training/global_step"] for step in resumed.steps] == list(range(SAVED + 1, decisions.STEPS + 1))


def test_the_resumed_run_has_the_weights_and_the_counts_of_the_run_that_went_on(whole, resumed):
    """Not its losses: with another number of agent workers other sessions of a prompt get its written rewards."""
    expected, actual = (load_file(run.folder / f"weights-{SAVED}.safetensors") for run in (whole, resumed))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    for expected, actual in zip(whole.steps[SAVED:], resumed.steps, strict=True):
        for name in ("rollwise/rollouts_generated", "rollwise/rows_replayed", "rollwise/buffer_bytes"):
            assert actual[name] == expected[name]


def test_each_shard_has_saved_its_rows(resumed):
    folder = resumed.folder.parent / "lost-power" / "global_step_4" / "rollwise"
    assert sorted(path.name for path in folder.glob("rollwise-*")) == [
        f"rollwise-0000{rank}-of-00003.arrow" for rank in range(3)
    ]
    state = load_state(folder)
    assert state["step"] == 3
    stored = state["rollouts"]
    assert stored
    assert all(len(rollout.payload["response_ids"]) == rollout.payload["response_lengths"].sum() for rollout in stored)
