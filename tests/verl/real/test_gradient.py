"""verl's optimizer is given the gradient of the slow row-by-row reference, and every rollout is counted."""

import pytest
from launch import launch
from real.reference import Reference, recorded_gradients, relative_error

BOUND = 1e-5
REPLAY = ("rollwise.replay.ratio=1.0", "rollwise.replay.warmup_steps=1", "rollwise.replay.max_age_steps=3")
FAST = ("rollwise.poll_seconds=0.1", "actor_rollout_ref.actor.optim.lr=3e-4")


@pytest.fixture(scope="module")
def two_ranks(inputs):
    """Replay on two processes; the loss is a mean over rows, and zero-variance rows stay in its normaliser."""
    run = launch(
        inputs,
        "two-ranks",
        *REPLAY,
        *FAST,
        "rollwise.drop_zero_variance=False",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        steps=4,
        ranks=2,
    )
    assert run.exit_code == 0, run.output[-5000:]
    return run


def check_gradients(run, **settings):
    reference = Reference(run, run.folder.parent / "model")
    batches = [batch for batch in run.of_kind("batch") if batch["rows"]]
    gradients = recorded_gradients(run)
    assert len(gradients) == len(batches)
    for batch, gradient in zip(batches, gradients, strict=True):
        assert relative_error(gradient, reference.gradient(batch, **settings)) < BOUND, batch["step"]
    return batches


def test_pilot_commit_and_replay_give_the_references_gradient(whole):
    batches = check_gradients(whole)
    sources = [row["source"] for batch in batches for row in batch["rows"]]
    assert {"pilot", "commit", "replay"} <= set(sources)
    ages = {batch["step"] - row["birth_step"] for batch in batches for row in batch["rows"]}
    assert max(ages) >= 2, "nothing stale was trained on: the test has shown nothing"


def test_pilots_go_out_with_the_last_steps_commits(whole):
    mixed = [event for event in whole.of_kind("ask") if {purpose for _, _, purpose in event["requests"]} > {"commit"}]
    assert mixed
    assert any(
        row["source"] == "pilot" and row["birth_step"] < batch["step"]
        for batch in whole.of_kind("batch")
        for row in batch["rows"]
    )


def test_the_ledger_has_every_completion_that_the_server_made(whole):
    requests = (whole.folder / "requests.jsonl").read_text().splitlines()
    assert whole.steps[-1]["rollwise/rollouts_generated"] == len(requests)
    told = [rollout for event in whole.of_kind("tell") for rollout in event["rollouts"]]
    assert len(told) == len(requests)
    assert whole.steps[-1]["rollwise/tokens_generated"] == sum(rollout["num_tokens"] for rollout in told)


def test_two_processes_give_the_references_gradient(two_ranks):
    batches = check_gradients(two_ranks, divide="rows")
    assert all(batch["normalizer_rows"] >= 16 for batch in batches), "zero-variance rows have left the normaliser"
    assert any(row["source"] == "replay" for batch in batches for row in batch["rows"])
