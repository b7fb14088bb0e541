"""No hang, and bad rewards do no harm: data that teaches nothing, rewards that fail, settings that make no sense."""

from launch import HERE, launch, make_inputs

REPLAY = ("rollwise.replay.ratio=0.5", "rollwise.replay.warmup_steps=0", "rollwise.poll_seconds=0.1")


def test_data_that_is_all_solved_ends_the_run_with_a_message_and_a_checkpoint(tmp_path):
    make_inputs(tmp_path, num_prompts=6)
    run = launch(
        tmp_path,
        "solved",
        "rollwise.allocation.name=pilot_commit",
        "+rollwise.allocation.solved_prompts=remove",
        f"reward.custom_reward_function.path={HERE}/verl_on_cpu/reward.py",
        "reward.custom_reward_function.name=always_right",
        "rollwise.poll_seconds=0.1",
        steps=20,
    )
    assert run.exit_code == 0, run.output[-5000:]
    assert len(run.steps) == 1
    assert "Training ends after step 1: all 6 prompts have been removed as solved" in run.output
    assert (tmp_path / "checkpoints" / "global_step_1" / "rollwise").is_dir()
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert run.steps[0]["rollwise/rollouts_generated"] == len((run.folder / "requests.jsonl").read_text().splitlines())
    # Nothing carried a gradient: no optimizer step.
    assert not list(run.folder.glob("gradient-*"))


def test_rewards_that_fail_are_unscored_and_counted_and_never_trained_on(tmp_path):
    make_inputs(tmp_path)
    run = launch(
        tmp_path,
        "failing",
        *REPLAY,
        "reward.custom_reward_function.name=sometimes_fails",
        steps=3,
    )
    assert run.exit_code == 0, run.output[-5000:]
    last = run.steps[-1]
    assert (
        last["rollwise/rollouts_generated"] == 3 * 16 == len((run.folder / "requests.jsonl").read_text().splitlines())
    )
    told = [rollout for event in run.of_kind("tell") for rollout in event["rollouts"]]
    assert any(rollout["reward"] != rollout["reward"] for rollout in told)
    rows = [row for event in run.of_kind("batch") for row in event["rows"]]
    assert rows
    assert all(row["reward"] in (0.0, 1.0) and abs(row["advantage"]) < 10 for row in rows)
    assert all(step["actor/grad_norm"] == step["actor/grad_norm"] for step in run.steps if "actor/grad_norm" in step)


def test_a_reward_function_that_never_works_ends_the_run_with_a_message(tmp_path):
    make_inputs(tmp_path)
    run = launch(tmp_path, "broken", *REPLAY, "reward.custom_reward_function.name=always_fails", steps=3)
    assert run.exit_code != 0
    assert "rollwise: none of the first 16 rollouts has a reward" in run.output


def test_a_setting_that_makes_no_sense_is_refused_before_ray_starts(tmp_path):
    make_inputs(tmp_path)
    kl = ("algorithm.use_kl_in_reward=True", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4")
    run = launch(tmp_path, "refused", *REPLAY, *kl, steps=1)
    assert run.exit_code == 1
    assert "rollwise: algorithm.use_kl_in_reward=True does not go with replay or allocation" in run.output
    assert "Traceback" not in run.output
    assert "Started a local Ray instance" not in run.output
