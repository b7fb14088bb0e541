"""Nothing is lost: a run that goes on from a checkpoint does what the run did that went on at once.

Also with another number of agent loop workers or of training processes, and with the rows in shards where they were on
the driver.
"""

import shutil

import decisions
import pytest
import torch
from launch import launch
from safetensors.torch import load_file

from rollwise.records.stored import stored_rows
from rollwise.storage import load_state
from rollwise.tasks.arithmetic import generate_problems
from rollwise.verl.reshard import reshard

SAVED, LATER = 2, 4


@pytest.fixture(scope="module")
def resumed(whole):
    """From the checkpoint of step 2, with all that came later taken away, as if the machine had lost power."""
    checkpoints = copy_checkpoint(whole.folder.parent / "checkpoints", SAVED, whole.folder.parent / "lost-power")
    # Of a checkpoint that was being written there is a part, and nothing says that it is there.
    shutil.copytree(checkpoints / f"global_step_{SAVED}" / "rollwise", checkpoints / "global_step_4" / "rollwise")
    extra = (
        "rollwise.payload_store=sharded",
        "rollwise.payload_shards=3",
        "actor_rollout_ref.rollout.agent.num_workers=2",
    )
    return go_on(whole, "resumed", checkpoints, SAVED, *extra)


@pytest.fixture(scope="module")
def on_two(whole):
    """From the checkpoint of step 2, which one process has written, on two."""
    checkpoints = copy_checkpoint(whole.folder.parent / "checkpoints", SAVED, whole.folder.parent / "on-two-saved")
    reshard(checkpoints / f"global_step_{SAVED}", 2)
    return go_on(whole, "on-two", checkpoints, SAVED, ranks=2)


@pytest.fixture(scope="module")
def back_on_one(whole, on_two):
    """From the checkpoint that those two have written at step 4, on one again."""
    folder = whole.folder.parent
    checkpoints = copy_checkpoint(folder / "on-two-saved", LATER, folder / "back-on-one-saved")
    reshard(checkpoints / f"global_step_{LATER}", 1)
    return go_on(whole, "back-on-one", checkpoints, LATER)


def copy_checkpoint(source, step, target):
    shutil.copytree(source / f"global_step_{step}", target / f"global_step_{step}")
    (target / "latest_checkpointed_iteration.txt").write_text(str(step))
    return target


def go_on(whole, name, checkpoints, step, *extra, should_fail=False, **settings):
    run = launch(
        whole.folder.parent,
        name,
        *decisions.verl_overrides(),
        "trainer.save_freq=2",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={checkpoints}",
        *extra,
        env={
            "VERL_ON_CPU_REWARDS": "decisions",
            "DECISIONS_FROM": str(whole.folder / "events.jsonl"),
            "DECISIONS_STEPS": str(step),
        },
        **decisions.verl_settings(),
        **settings,
    )
    assert (run.exit_code != 0) == should_fail, run.output[-5000:]
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


def test_inspect_shows_the_texts_of_what_is_stored(resumed):
    rows = stored_rows(resumed.folder.parent / "lost-power")
    problems = [problem.prompt for problem in generate_problems(decisions.NUM_PROMPTS, seed=0, levels=("sort-3",))]
    assert rows
    assert all(row["prompt"] == problems[row["prompt_id"]] for row in rows)
    assert all(row["completion"] is not None for row in rows)
    assert any(row["completion"] for row in rows)


def test_another_number_of_training_processes_goes_on_with_the_same_weights_and_decisions(whole, on_two, back_on_one):
    for before, after, step in ((whole, on_two, SAVED), (on_two, back_on_one, LATER)):
        expected, actual = (load_file(run.folder / f"weights-{step}.safetensors") for run in (before, after))
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
        for kind in ("ask", "batch"):
            assert decided(after.events, kind) == [e for e in decided(whole.events, kind) if e[0] >= step]
    # The optimizer has gone on too: its steps are counted from the run's beginning.
    expected, actual = (optimizer_steps(whole.folder.parent / name) for name in ("checkpoints", "back-on-one-saved"))
    assert actual == expected > LATER


def optimizer_steps(checkpoints):
    path = checkpoints / f"global_step_{decisions.STEPS}" / "actor" / "optim_world_size_1_rank_0.pt"
    return float(torch.load(path, weights_only=True)["state"][0]["step"])


def test_another_number_of_training_processes_is_told_what_to_run_first(whole):
    folder = whole.folder.parent
    checkpoints = copy_checkpoint(folder / "checkpoints", SAVED, folder / "not-resharded")
    run = go_on(whole, "refused", checkpoints, SAVED, should_fail=True, ranks=2)
    remedy = f"python -m rollwise.verl.reshard {checkpoints}/global_step_{SAVED} --processes 2"
    assert f"rollwise: there are 2 training processes, and {checkpoints}/global_step_{SAVED}/actor has" in run.output
    assert remedy in run.output
