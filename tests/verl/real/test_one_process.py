"""Every way to allocate, replay and correct, against the row-by-row reference: verl's trainer in one process."""

import pytest
from launch import launch
from real import pictures
from real.one_process import Played, SeeingAgent
from real.reference import Reference, relative_error
from transformers import AutoModelForImageTextToText
from verl_on_cpu.reward import always_right

from rollwise.verl.rows import nbytes

BOUND = 1e-5
REPLAY = ("rollwise.replay.ratio=1.0", "rollwise.replay.warmup_steps=1", "rollwise.replay.max_age_steps=3")
PILOT_COMMIT = (
    "rollwise.allocation.name=pilot_commit",
    "+rollwise.allocation.pilot_rollouts=2",
    "+rollwise.allocation.p_upper=0.9",
)
DYNAMIC = ("rollwise.allocation.name=dynamic_sampling",)
ROWS = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
FRESHPER = (
    "rollwise.replay.ratio=0",
    "rollwise.replay.updates_per_fresh=1",
    "rollwise.replay.priority=abs_reward",
    "rollwise.replay.epsilon=0.1",
    "rollwise.replay.decay_tau_steps=20",
    "rollwise.replay.warmup_steps=0",
)


@pytest.fixture
def play(tmp_path, monkeypatch, inputs):
    def start(*extra, steps=4, rollouts=6, **settings):
        settings = {"inputs": inputs, "steps": steps, "rollouts": rollouts} | settings
        return Played(tmp_path / "run", monkeypatch, *extra, **settings).play(steps)

    return start


def check_gradients(run, inputs, **settings):
    return check_against(Reference(run, inputs / "model"), run, **settings)


def check_against(reference, run, **settings):
    batches = [batch for batch in run.of_kind("batch") if batch["rows"]]
    assert len(batches) == len(run.gradients) > 1
    for batch, gradient in zip(batches, run.gradients, strict=True):
        assert relative_error(gradient, reference.gradient(batch, **settings)) < BOUND, batch["step"]
    return batches


@pytest.mark.parametrize(
    ("extra", "settings"),
    [
        ((*REPLAY,), {}),
        ((*PILOT_COMMIT, *REPLAY), {}),
        ((*PILOT_COMMIT, *REPLAY, ROWS), {"divide": "rows"}),
        ((*REPLAY, ROWS, "rollwise.drop_zero_variance=False"), {"divide": "rows"}),
        ((*REPLAY, "rollwise.drop_zero_variance=False"), {}),
        ((*REPLAY, "algorithm.rollout_correction.bypass_mode=True"), {}),
        ((*REPLAY, "algorithm.rollout_correction.rollout_is=token"), {"correction": "weights"}),
        ((*DYNAMIC, *FRESHPER), {}),
        ((*PILOT_COMMIT, "rollwise.replay.ratio=0.5", "rollwise.replay.composition=pool"), {}),
        ((*REPLAY, "rollwise.replay.per_beta=0.5"), {}),
    ],
    ids=lambda value: "-".join(v.split("=")[-1] for v in value) if isinstance(value, tuple) else None,
)
def test_the_gradient_is_the_references(play, inputs, extra, settings):
    run = play(*extra)
    batches = check_gradients(run, inputs, **settings)
    ages = [batch["step"] - row["birth_step"] for batch in batches for row in batch["rows"]]
    assert max(ages) >= 1, "nothing stale was trained on: the test has shown nothing"
    generated = run.steps[-1]["rollwise/rollouts_generated"]
    assert generated == run.agent.num_completions == sum(len(event["rollouts"]) for event in run.of_kind("tell"))
    assert not any(run.queue.rows.values()), "rows were left in the queue"


def test_a_batch_is_cut_into_as_many_updates_as_verl_cuts_its_own(play):
    run = play(*REPLAY, "actor_rollout_ref.actor.ppo_mini_batch_size=2", steps=3)
    per_update = run.trainer.actor_rollout_wg.rows_per_update
    batches = [batch for batch in run.of_kind("batch") if batch["rows"]]
    assert len(per_update) == 2 * len(batches)
    for i, batch in enumerate(batches):
        assert per_update[2 * i] == per_update[2 * i + 1] >= len(batch["rows"]) / 2


def test_rollouts_of_several_rows_are_one_rollout_each(play, inputs):
    """An agent that begins its context anew: a trajectory is replayed whole."""
    run = play(*REPLAY, rows_per_session=2, steps=3)
    batches = check_gradients(run, inputs)
    rows = [row for batch in batches for row in batch["rows"]]
    assert all(len(row["response_lengths"]) == 2 for row in rows)
    assert any(row["source"] == "replay" for row in rows)


def odd_length(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """What an untrained model can be right about."""
    return {"score": float(sum(map(ord, solution_str)) % 2)}


def test_rollouts_with_images_are_replayed_with_them(play, tmp_path):
    """The reference makes them anew from the prompts, and has the model find the tokens' positions."""
    inputs = pictures.make_inputs_with_pictures(tmp_path)
    seeing = {"model_class": AutoModelForImageTextToText}
    model = f"actor_rollout_ref.model.path={inputs}/seeing"
    run = play(*PILOT_COMMIT, *REPLAY, model, inputs=inputs, agent_class=SeeingAgent, reward=odd_length, **seeing)
    reference = Reference(run, inputs / "seeing", inputs_of=pictures.model_inputs, **seeing)
    batches = check_against(reference, run)
    replayed = [row for batch in batches for row in batch["rows"] if row["source"] == "replay"]
    counts = {row["prompt_ids"].count(pictures.SPECIAL_IDS[2]) for row in replayed}
    assert counts == {0, 1, 2}
    stored = run.trainer.scheduler.buffer.rollouts
    assert all(rollout.nbytes == nbytes(rollout.payload) for rollout in stored if "old_log_probs" in rollout.payload)
    assert any("media.pixel_values" in rollout.payload for rollout in stored)


def test_images_come_through_a_real_transferqueue(inputs):
    run = launch(inputs, "pictures", main="real.pictures_in_queue", steps=1)
    assert run.exit_code == 0, run.output[-5000:]
    assert "the images are as they were" in run.output


def test_a_step_without_a_gradient_leaves_the_weights_alone(play):
    run = play(*REPLAY, reward=always_right, steps=2)
    assert not run.gradients
    assert run.steps[-1]["rollwise/rollouts_wasted"] == run.agent.num_completions == 48


def test_the_scheduler_ends_the_run(play):
    run = play("rollwise.budget_rollouts=20", *REPLAY, steps=1)
    run.trainer._save_checkpoint = lambda: None
    run.trainer.total_training_steps = 10
    run.trainer.on_step_end()
    assert run.trainer.total_training_steps == 1
    assert "24 rollouts have been generated (rollwise.budget_rollouts is 20)" in run.trainer.stop_reason
