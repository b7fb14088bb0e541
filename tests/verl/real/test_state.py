"""Nothing is lost: a run that is killed goes on as if it had not been, also with other workers and shards."""

import json
import os
import signal
import time

import pytest
from launch import launch
from verl_on_cpu.recording import FOLDER  # noqa: F401 - the plug-in can be imported

STEPS, SAVED = 5, 2
SETTINGS = (
    "rollwise.allocation.name=pilot_commit",
    "+rollwise.allocation.pilot_rollouts=2",
    "+rollwise.allocation.p_upper=0.9",
    "rollwise.replay.ratio=0.5",
    "rollwise.replay.warmup_steps=1",
    "rollwise.payload_store=sharded",
    "rollwise.poll_seconds=0.1",
    "actor_rollout_ref.actor.optim.lr=3e-4",
    f"trainer.save_freq={SAVED}",
)


def until_step(path, step, process, timeout_seconds=1500):
    """Wait until a run has logged a step, then kill it, as a machine would that loses power."""
    end = time.monotonic() + timeout_seconds
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and path.read_text().count("\n") >= step:
            os.kill(process.pid, signal.SIGKILL)
            return
        time.sleep(0.5)
    raise TimeoutError(f"{path} has no step {step}")


@pytest.fixture(scope="module")
def runs(inputs):
    whole = launch(
        inputs,
        "whole",
        *SETTINGS,
        "rollwise.payload_shards=2",
        f"trainer.default_local_dir={inputs}/whole-checkpoints",
        steps=STEPS,
        rollouts=6,
    )
    assert whole.exit_code == 0, whole.output[-5000:]
    folder = f"trainer.default_local_dir={inputs}/killed-checkpoints"
    killed = launch(
        inputs,
        "killed",
        *SETTINGS,
        "rollwise.payload_shards=2",
        folder,
        steps=STEPS,
        rollouts=6,
        wait=lambda process: until_step(inputs / "killed.jsonl", SAVED + 1, process),
    )
    assert killed.exit_code == -signal.SIGKILL
    resumed = launch(
        inputs,
        "resumed",
        *SETTINGS,
        "rollwise.payload_shards=3",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        folder,
        "trainer.resume_mode=auto",
        steps=STEPS,
        rollouts=6,
    )
    assert resumed.exit_code == 0, resumed.output[-5000:]
    return whole, killed, resumed


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


def test_the_resumed_run_asks_and_draws_as_the_run_that_was_not_killed(runs):
    whole, killed, resumed = runs
    assert len(killed.steps) == SAVED + 1, "it was killed after its checkpoint"
    for kind in ("ask", "batch"):
        expected = [event for event in decided(whole.events, kind) if event[0] >= SAVED]
        assert decided(resumed.events, kind) == expected
    assert any(row[3] == "replay" for _, rows in decided(resumed.events, "batch") for row in rows)
    assert [step["training/global_step"] for step in resumed.steps] == list(range(SAVED + 1, STEPS + 1))


def test_the_resumed_runs_figures_are_those_of_the_run_that_was_not_killed(runs):
    whole, _, resumed = runs
    for expected, actual in zip(whole.steps[SAVED:], resumed.steps, strict=True):
        for name in ("rollwise/rollouts_generated", "rollwise/rows_replayed", "rollwise/buffer_bytes"):
            assert actual[name] == expected[name]
        for name in ("actor/pg_loss", "actor/grad_norm"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5)


def test_a_damaged_state_is_refused_by_its_name(inputs, runs):
    folder = inputs / "killed-checkpoints" / f"global_step_{SAVED}" / "rollwise"
    path = next(folder.glob("*.arrow"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-100] + bytes(50) + whole[-50:])
    try:
        run = launch(
            inputs,
            "damaged",
            *SETTINGS,
            "rollwise.payload_shards=2",
            f"trainer.resume_from_path={folder.parent}",
            "trainer.resume_mode=resume_path",
            steps=STEPS,
            rollouts=6,
        )
    finally:
        path.write_bytes(whole)
    assert run.exit_code != 0
    assert f"{path.name} is damaged" in run.output
    assert "resume from an earlier checkpoint" in run.output


def test_a_checkpoint_says_what_is_in_it(inputs, runs):
    import pyarrow

    folder = inputs / "whole-checkpoints" / f"global_step_{SAVED}" / "rollwise"
    assert len(list(folder.glob("*.arrow"))) == 2
    table = pyarrow.ipc.open_file(pyarrow.memory_map(str(next(folder.glob("*.arrow"))))).read_all()
    assert {"prompt_id", "reward", "advantage", "payload.response_ids"} <= set(table.column_names)
    state = json.loads(table.schema.metadata[b"rollwise"])
    assert state["step"] == SAVED - 1
