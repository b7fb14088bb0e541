"""Further ways to run: a critic with TD-error priority, FreshPER, dynamic sampling, verl's own corrections."""

from launch import launch
from real.reference import Reference, recorded_gradients, relative_error

FAST = ("rollwise.poll_seconds=0.1", "actor_rollout_ref.actor.optim.lr=3e-4")
CRITIC = (
    "algorithm.adv_estimator=gae",
    "critic.strategy=fsdp2",
    "critic.fsdp.dtype=float32",
    "critic.fsdp.model_dtype=fp32",
    "+critic.fsdp.mixed_precision.param_dtype=fp32",
    "critic.fsdp.use_torch_compile=False",
    "critic.model.use_remove_padding=False",
    "+critic.model.override_config.attn_implementation=eager",
    "critic.model.enable_gradient_checkpointing=False",
    "critic.ppo_mini_batch_size=8",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "critic.forward_micro_batch_size_per_gpu=4",
    "critic.optim.lr=1e-3",
)


def test_trajectories_are_replayed_by_their_td_errors_where_there_is_a_critic(inputs):
    run = launch(
        inputs,
        "critic",
        *CRITIC,
        *FAST,
        f"critic.model.path={inputs}/model",
        "rollwise.replay.priority=td_error",
        "rollwise.replay.ratio=0.5",
        "rollwise.replay.warmup_steps=1",
        steps=3,
        prompts=8,
        rollouts=1,
    )
    assert run.exit_code == 0, run.output[-5000:]
    batches = run.of_kind("batch")
    assert [len(batch["rows"]) for batch in batches] == [8, 12, 12]
    assert all("critic/vf_loss" in step for step in run.steps)
    errors = [row["td_error"] for row in batches[0]["rows"]]
    assert all(error > 0 for error in errors)
    assert len(set(errors)) > 4
    assert run.steps[-1]["rollwise/rollouts_generated"] == 24


def test_freshper_replays_between_fresh_updates_and_verls_weights_correct_it(inputs):
    """K replay-only updates after each fresh one; truncated importance weights by verl's rollout correction."""
    run = launch(
        inputs,
        "freshper",
        *FAST,
        "rollwise.replay.ratio=0",
        "rollwise.replay.updates_per_fresh=1",
        "rollwise.replay.priority=abs_reward",
        "rollwise.replay.epsilon=0.1",
        "rollwise.replay.alpha=0.6",
        "rollwise.replay.decay_tau_steps=20",
        "rollwise.replay.warmup_steps=0",
        "rollwise.allocation.name=dynamic_sampling",
        "algorithm.rollout_correction.rollout_is=token",
        steps=4,
    )
    assert run.exit_code == 0, run.output[-5000:]
    batches = run.of_kind("batch")
    sources = [{row["source"] for row in batch["rows"]} for batch in batches]
    assert sources[1] == sources[3] == {"replay"}
    assert "replay" not in sources[0] | sources[2]
    assert len(batches[1]["rows"]) == len(batches[0]["rows"])
    assert sum(bool(event["requests"]) for event in run.of_kind("ask") if event["step"] in (1, 3)) == 0
    reference = Reference(run, inputs / "model")
    gradients = recorded_gradients(run)
    for batch, gradient in zip(batches, gradients, strict=True):
        assert relative_error(gradient, reference.gradient(batch, correction="weights")) < 1e-5, batch["step"]


def test_verls_bypass_mode_takes_the_stored_log_probs_at_generation(inputs):
    run = launch(
        inputs,
        "bypass",
        *FAST,
        "rollwise.replay.ratio=1.0",
        "rollwise.replay.warmup_steps=1",
        "algorithm.rollout_correction.bypass_mode=True",
        steps=3,
    )
    assert run.exit_code == 0, run.output[-5000:]
    reference = Reference(run, inputs / "model")
    batches = [batch for batch in run.of_kind("batch") if batch["rows"]]
    assert any(row["source"] == "replay" for batch in batches for row in batch["rows"])
    for batch, gradient in zip(batches, recorded_gradients(run), strict=True):
        assert relative_error(gradient, reference.gradient(batch)) < 1e-5, batch["step"]
