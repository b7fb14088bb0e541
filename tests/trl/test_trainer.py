"""What the trainer does besides the gradient: the ledger, bad rewards, ends, checkpoints, refusals."""

import itertools
import logging
import math
import re
import time

import pyarrow.parquet as pq
import pytest
import tiny
import torch
import trl.trainer.utils
from datasets import Dataset, IterableDataset
from transformers import MixtralConfig, MixtralForCausalLM
from trl import GRPOConfig

from rollwise import ConfigError, InexactSettingError, RewardError, StateError
from rollwise.trl import RollwiseGRPOTrainer

ALL = {
    "allocation": "pilot_commit",
    "pilot_rollouts": 3,
    "p_lower": 0.1,
    "replay_ratio": 0.5,
    "gradient_accumulation_steps": 2,
}


class CountingTrainer(RollwiseGRPOTrainer):
    """Counts completions where TRL makes them."""

    completions = 0

    def _generate(self, prompts, *args, **kwargs):
        generated = super()._generate(prompts, *args, **kwargs)
        if self.model.training:
            self.completions += len(generated[1])
        return generated


def with_reward(tmp_path, reward, eval_dataset=None, **settings):
    trainer = RollwiseGRPOTrainer(
        model=tiny.model(),
        reward_funcs=reward,
        args=tiny.config(tmp_path, **settings),
        train_dataset=tiny.dataset(),
        eval_dataset=eval_dataset,
        processing_class=tiny.tokenizer(),
    )
    return trainer


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


# --- promise 4: nothing is double-counted or hidden ---------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"replay_ratio": 0.5}, ALL], ids=["off", "replay", "all"])
def test_ledger_total_is_the_number_of_completions_generated(tmp_path, settings):
    trainer = tiny.trainer(tmp_path, trainer_class=CountingTrainer, **settings)
    trainer.train()
    totals = trainer.ledger.totals()
    assert totals["rollouts_generated"] == trainer.completions > 0
    assert (
        totals["rollouts_trained"] + totals["rollouts_wasted"] + totals["rollouts_pending"]
        == totals["rollouts_generated"]
    )
    purposes = trainer.ledger.by_purpose()
    assert set(purposes) == ({"pilot", "commit"} if "allocation" in settings else {"uniform"})
    if "allocation" in settings:
        assert purposes["commit"] == 5 * 4 * 4  # commits per prompt, prompts per step, steps
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1]["rollwise/rollouts_generated"] == trainer.completions
    assert sum(entry["rollwise/step_rollouts_generated"] for entry in logged) == trainer.completions
    assert sum(entry["rollwise/step_rows_replayed"] for entry in logged) == totals["rows_replayed"]

    table = pq.read_table(trainer.ledger.save(tmp_path / "ledger.parquet")).to_pylist()
    assert sum(row["rollouts"] for row in table if row["kind"] == "generated") == trainer.completions
    assert sum(row["rollouts"] for row in table if row["kind"] == "replayed") == totals["rows_replayed"]


@pytest.mark.parametrize("settings", [{}, {"replay_ratio": 0.5}], ids=["off", "replay"])
def test_tokens_of_truncated_completions_are_counted_though_masked(tmp_path, settings):
    lengths = []

    class Watching(RollwiseGRPOTrainer):
        def _generate(self, prompts, *args, **kwargs):
            generated = super()._generate(prompts, *args, **kwargs)
            lengths.extend(map(len, generated[1]))
            return generated

    trainer = tiny.trainer(tmp_path, trainer_class=Watching, mask_truncated_completions=True, **settings)
    trainer.train()
    assert trainer.ledger.totals()["tokens_generated"] == sum(lengths)
    assert trainer.ledger.by_outcome()["truncated"] > 0


def test_replay_when_unused_columns_are_removed(tmp_path):
    def starts_with_a_digit(completions, **kwargs):
        return [float(completion[:1].isdigit()) for completion in completions]

    trainer = with_reward(tmp_path, starts_with_a_digit, replay_ratio=0.5, remove_unused_columns=True)
    trainer.train()
    assert trainer.ledger.totals()["rows_replayed"] > 0


def test_evaluation_counts_nothing_and_logs_accuracy(tmp_path):
    def first_is_right(completions, answer, **kwargs):
        return [float(right == "1") for right in answer]

    trainer = RollwiseGRPOTrainer(
        model=tiny.model(),
        reward_funcs=first_is_right,
        args=tiny.config(tmp_path, per_device_eval_batch_size=8, num_generations_eval=2, eval_strategy="no", **ALL),
        train_dataset=tiny.dataset(),
        eval_dataset=Dataset.from_list([{"prompt": "0+1=", "answer": "1"}] * 5 + [{"prompt": "1+1=", "answer": "2"}]),
        processing_class=tiny.tokenizer(),
    )
    metrics = trainer.evaluate()
    logged = trainer.state.log_history[-1] | metrics
    assert logged["eval_rollwise/accuracy"] == pytest.approx(5 / 6)
    assert trainer.ledger.totals()["rollouts_generated"] == 0
    assert not any("accuracy/" in name for name in logged)


@pytest.mark.parametrize("remove_unused_columns", [False, True])
def test_held_out_accuracy_is_told_apart_by_a_column(tmp_path, remove_unused_columns):
    def by_kind(completions, prompts, **kwargs):
        return [{"0": 1.0, "1": 0.0, "2": None}[prompt[0]] for prompt in prompts]

    first = {"easy": "0", "hard": "1", "unscored": "2"}
    kinds = ["easy"] * 3 + ["hard"] * 2 + ["unscored"]
    rows = [{"prompt": f"{first[kind]}+1=", "kind": kind} for kind in kinds]
    trainer = with_reward(
        tmp_path,
        by_kind,
        eval_dataset=Dataset.from_list(rows),
        eval_accuracy_column="kind",
        remove_unused_columns=remove_unused_columns,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
    )
    for _ in range(2):  # the second counts afresh
        logged = trainer.evaluate()
        assert logged["eval_rollwise/pass@2"] == pytest.approx(3 / 5)
        assert logged["eval_rollwise/tokens/right"] > 0
        found = {name: value for name, value in logged.items() if "accuracy" in name}
        assert found == {
            "eval_rollwise/accuracy": pytest.approx(3 / 5),
            "eval_rollwise/accuracy/easy": 1.0,
            "eval_rollwise/accuracy/hard": 0.0,
        }


def test_a_column_that_the_held_out_problems_lack_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="eval_accuracy_column is 'level', but eval_dataset has the columns prompt"):
        with_reward(tmp_path, tiny.contains_answer, eval_dataset=tiny.dataset(4), eval_accuracy_column="level")


# --- promise 5: bad rewards do no harm ----------------------------------------------------------------------------


def unscorable(kind):
    """A reward that cannot score every third completion; the rest is right or wrong in turn."""
    calls = itertools.count()

    def reward(completions, **kwargs):
        scores = []
        for _ in completions:
            i = next(calls)
            scores.append(kind if i % 3 == 0 else float(i % 2))
        return scores

    return reward


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({}, None), ({}, math.inf), ({"replay_ratio": 0.5}, None), (ALL, None), (ALL, math.nan), (ALL, -math.inf)],
    ids=["off-None", "off-inf", "replay-None", "all-None", "all-nan", "all--inf"],
)
def test_unscored_rollouts_are_counted_and_never_trained_on(tmp_path, settings, kind):
    trainer = with_reward(tmp_path, unscorable(kind), max_steps=3, **settings)
    packed = []
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: packed.append(generate(inputs)) or packed[-1]
    trainer.train()
    assert trainer.ledger.by_outcome()["unscored"] > 0
    for output in packed:
        assert torch.isfinite(output["advantages"]).all()
    assert torch.isfinite(weights(trainer)).all()
    if trainer.scheduler.buffer is not None:
        assert all(rollout.is_scored for rollout in trainer.scheduler.buffer.rollouts)
        assert len(trainer.scheduler.buffer) > 0


def test_an_unscored_rollout_does_not_shift_its_groups_baseline(tmp_path):
    """Rewards of a group: one missing, one right, six wrong. The mean is 1/7, whatever TRL's release does."""

    def reward(completions, **kwargs):
        return [None, 1.0, *[0.0] * 6] * (len(completions) // 8)

    trainer = with_reward(tmp_path, reward, max_steps=1)
    packed = []
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: packed.append(generate(inputs)) or packed[-1]
    trainer.train()
    deviation = math.sqrt((6 / 7**2 + (6 / 7) ** 2) / 6) + 1e-4
    expected = [0.0, 6 / 7 / deviation, *[-1 / 7 / deviation] * 6] * 2
    assert packed[0]["advantages"].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, ALL], ids=["off", "all"])
def test_a_reward_that_raises_leaves_only_its_completion_unscored(tmp_path, settings, caplog):
    calls = itertools.count()

    def picky(completions, **kwargs):
        if len(completions) > 1 and next(calls) == 1:
            picky.raised = True
            raise ValueError("cannot parse")
        if getattr(picky, "raised", False) and len(completions) == 1 and next(calls) % 4 == 0:
            raise ValueError("cannot parse this one")
        return [float(i % 2) for i in range(len(completions))]

    trainer = with_reward(tmp_path, picky, max_steps=3, **settings)
    with caplog.at_level(logging.WARNING, logger="rollwise"):
        trainer.train()
    assert trainer.state.global_step == 3
    assert 0 < trainer.ledger.by_outcome()["unscored"] < trainer.ledger.totals()["rollouts_generated"] / 2
    assert "left unscored" in caplog.text
    assert "cannot parse this one" in caplog.text


def test_a_reward_that_never_works_ends_the_run_at_once(tmp_path):
    def broken(completions, **kwargs):
        raise KeyError("anwser")

    with pytest.raises(RewardError, match="'broken' failed for each of the first 16 completions.*anwser"):
        with_reward(tmp_path, broken).train()


def test_a_reward_that_hangs_is_unscored_in_bounded_time(tmp_path):
    def hangs_on_ones(completions, prompts, **kwargs):
        if any(prompt.endswith("1+1=") for prompt in prompts):
            while True:
                pass
        return [float("1" in completion) for completion in completions]

    prompts = [{"prompt": "1+1="}, {"prompt": "2+0="}] * 8
    trainer = RollwiseGRPOTrainer(
        model=tiny.model(),
        reward_funcs=hangs_on_ones,
        args=tiny.config(tmp_path, max_steps=1, reward_timeout_seconds=0.1, shuffle_dataset=False),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tiny.tokenizer(),
    )
    started = time.monotonic()
    trainer.train()
    assert time.monotonic() - started < 30
    assert trainer.ledger.by_outcome()["unscored"] == 8


# --- promise 6: every end is a defined one ------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"replay_ratio": 0.5}, ALL], ids=["off", "replay", "all"])
@pytest.mark.parametrize(
    ("score", "finding"), [(1.0, "all solved"), (0.0, "all hopeless"), (None, "none of their rollouts could be scored")]
)
def test_data_that_teaches_nothing_ends_with_a_message_and_a_checkpoint(tmp_path, caplog, settings, score, finding):
    trainer = with_reward(
        tmp_path, lambda completions, **_: [score] * len(completions), max_steps=50, patience_prompts=40, **settings
    )
    before = weights(trainer).clone()
    with caplog.at_level(logging.WARNING, logger="rollwise"):
        trainer.train()
    steps = trainer.state.global_step
    assert 0 < steps < 25
    assert finding in trainer.stop_reason
    assert trainer.stop_reason in caplog.text
    assert trainer.ledger.totals()["rollouts_generated"] <= 48 * 8 * 2
    assert (tmp_path / f"checkpoint-{steps}" / "model.safetensors").exists()
    if settings:
        assert torch.equal(weights(trainer), before)  # nothing to learn from moves nothing, momentum included


def test_removal_of_every_prompt_ends_the_run(tmp_path):
    trainer = with_reward(
        tmp_path,
        lambda completions, **_: [1.0] * len(completions),
        max_steps=50,
        patience_prompts=0,
        **(ALL | {"solved_prompts": "remove"}),
    )
    trainer.train()
    assert trainer.state.global_step < 10
    assert "all 48 prompts have been removed" in trainer.stop_reason
    assert trainer.ledger.by_outcome()["solved"] == 48 * 3


def test_without_patience_a_hopeless_run_goes_on(tmp_path):
    trainer = with_reward(
        tmp_path, lambda completions, **_: [0.0] * len(completions), max_steps=6, patience_prompts=0, replay_ratio=0.5
    )
    trainer.train()
    assert trainer.state.global_step == 6
    assert trainer.stop_reason is None


@pytest.mark.parametrize("settings", [{}, ALL], ids=["off", "all"])
@pytest.mark.parametrize("num_prompts", [0, 1])
def test_a_data_set_smaller_than_a_batch_is_refused_at_once(tmp_path, settings, num_prompts):
    data = tiny.dataset(4).select(range(num_prompts))
    with pytest.raises(ConfigError, match=rf"train_dataset has {num_prompts} prompts, one batch takes"):
        tiny.trainer(tmp_path, train_dataset=data, **settings)


def test_pool_of_exactly_one_batch(tmp_path):
    trainer = tiny.trainer(tmp_path, train_dataset=tiny.dataset(4), max_steps=6, **ALL)
    trainer.train()
    assert trainer.state.global_step == 6


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "bnpo"}, "loss_type='bnpo'.*micro-batches.*use one of"),
        ({"beta": 0.1}, "beta=0.1.*KL term.*set beta to 0.0"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5.*set top_entropy_quantile to 1.0"),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation.*set multi_objective_aggregation",
        ),
        ({"use_liger_kernel": True}, "use_liger_kernel=True.*set use_liger_kernel to False"),
    ],
)
@pytest.mark.parametrize(
    "active", [{"replay_ratio": 0.5}, {"allocation": "pilot_commit"}, {"drop_zero_variance": True}]
)
def test_inexact_settings_are_refused_with_reason_and_alternative(tmp_path, settings, message, active):
    with pytest.raises(InexactSettingError, match=message):
        tiny.config(tmp_path, **settings, **active)
    tiny.config(tmp_path, **settings)  # off: TRL's business


@pytest.mark.skipif(
    "router_aux_loss_coef" not in GRPOConfig.__dataclass_fields__, reason="this TRL has no load-balancing loss"
)
def test_a_mixture_of_experts_trains_without_the_loss_that_acts_on_rows_left_out(tmp_path):
    def trainer_of(**settings):
        config = MixtralConfig(
            vocab_size=17,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            pad_token_id=tiny.PAD,
            eos_token_id=tiny.EOS,
            bos_token_id=None,
        )
        policy = MixtralForCausalLM(config)
        return tiny.trainer(tmp_path, policy=policy, max_steps=2, replay_ratio=0.5, **settings)

    with pytest.raises(InexactSettingError, match="load-balancing loss.*set router_aux_loss_coef to 0.0"):
        trainer_of()
    trainer = trainer_of(router_aux_loss_coef=0.0)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay_ratio": -1.0}, "replay_ratio is -1.0; it must be finite and at least 0"),
        ({"replay_max_age_steps": 0}, "max_age_steps is 0.*at least 1"),
        ({"replay_decay_tau_steps": 0.0}, "decay_tau_steps is 0.0.*above 0"),
        ({"budget_rollouts": 0}, "budget_rollouts is 0; it must be at least 1"),
        ({"replay_capacity_bytes": 0}, "replay_capacity_bytes is 0"),
        ({"replay_decay_tau_steps": "slow"}, "replay_decay_tau_steps is 'slow'; it must be a number above 0, 'auto'"),
        ({"replay_decay_tau_kl": -1.0}, "replay_decay_tau_kl is -1.0; it must be a number above 0, or None"),
        ({"replay_max_age_versions": 0}, "replay_max_age_versions is 0.*at least 1"),
        ({"replay_per_beta": 1.5}, "replay_per_beta is 1.5; it must be between 0 and 1"),
        ({"replay_per_beta": 0.5, "replay_priority": "recency"}, "which 'recency' has none of"),
        ({"replay_updates_per_fresh": -1}, "replay_updates_per_fresh is -1"),
        ({"replay_correction": "vtrace"}, "replay_correction is 'vtrace'; it must be one of"),
        ({"replay_truncation_cap": 0.0}, "replay_truncation_cap is 0.0; it must be above 0"),
        ({"replay_mask_bound": 1.0}, "replay_mask_bound is 1.0; it must be above 1"),
        (
            {"replay_correction": "none", "off_policy_mask_threshold": 0.1},
            "off_policy_mask_threshold=0.1 looks at the ratio that replay_correction='none' replaces",
        ),
        (
            {"allocation": "pilot_commit", "replay_updates_per_fresh": 5},
            "max_survivor_age_steps is 4.*with 5 replay-only updates after it.*at least 6",
        ),
        ({"allocation": "magic"}, "allocation is 'magic'; it must be one of \\['belief', 'dynamic_sampling'"),
        ({"allocation_kwargs": {"half_life": 3}}, "has \\['half_life'\\], which allocation 'uniform' does not know"),
        ({"allocation_kwargs": "half_life=3"}, "allocation_kwargs is 'half_life=3'; give a mapping"),
        (
            {"allocation": "pilot_commit", "allocation_kwargs": {"p_lower": 0.1}},
            "\\['p_lower'\\].*of their own",
        ),
        (
            {"allocation": "belief", "allocation_kwargs": {"half_life_steps": 0}},
            "half_life_steps is 0",
        ),
        (
            {"allocation": "belief", "belief_bucket_column": "level"},
            "belief_bucket_column is 'level', and",
        ),
        (
            {"replay_ratio": 0.5, "prompt_id_column": "uid"},
            "prompt_id_column is 'uid', and",
        ),
        ({"allocation": "pilot_commit", "pilot_rollouts": 8}, "pilot_rollouts is 8 of num_generations 8"),
        ({"allocation": "pilot_commit", "p_lower": 0.9}, "p_lower 0.9, p_upper 0.75"),
        ({"allocation": "pilot_commit", "max_survivor_age_steps": 0}, "max_survivor_age_steps is 0"),
        ({"reward_timeout_seconds": 0.0}, "reward_timeout_seconds is 0.0"),
        ({"patience_prompts": -1}, "patience_prompts is -1"),
        (
            {"replay_ratio": 0.5, "replay_max_age_steps": 2, "num_iterations": 3},
            "replay_max_age_steps is 2, but one batch of rollouts is trained on for 3 steps.*at least 3",
        ),
        (
            {"allocation": "pilot_commit", "steps_per_generation": 10, "gradient_accumulation_steps": 2},
            "max_survivor_age_steps is 4, but one batch of rollouts is trained on for 5 steps.*at least 5",
        ),
    ],
)
def test_settings_out_of_bounds_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny.trainer(tmp_path, **settings)


def test_plain_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="args is a GRPOConfig; give a rollwise.trl.RollwiseGRPOConfig"):
        RollwiseGRPOTrainer(
            model=tiny.model(),
            reward_funcs=tiny.contains_answer,
            args=GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False),
            train_dataset=tiny.dataset(),
            processing_class=tiny.tokenizer(),
        )


@pytest.mark.skipif(
    not hasattr(trl.trainer.utils, "repeat_iterable_dataset"), reason="this release of TRL takes no streams"
)
def test_streams_train_with_replay_and_are_refused_by_pilot_commit(tmp_path):
    stream = tiny.dataset().to_iterable_dataset()
    assert isinstance(stream, IterableDataset)
    trainer = tiny.trainer(tmp_path, train_dataset=stream, replay_ratio=0.5)
    trainer.train()
    assert trainer.ledger.totals()["rows_replayed"] > 0
    with pytest.raises(ConfigError, match="allocation='pilot_commit' chooses prompts by their position"):
        tiny.trainer(tmp_path, train_dataset=stream, **ALL)


def test_a_run_ends_when_its_budget_is_spent_with_a_checkpoint_and_an_evaluation(tmp_path, caplog):
    trainer = tiny.trainer(
        tmp_path,
        max_steps=50,
        budget_rollouts=100,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=1000,
        eval_dataset=tiny.dataset(4),
        **ALL,
    )
    with caplog.at_level(logging.WARNING, logger="rollwise"):
        trainer.train()
    generated = trainer.ledger.totals()["rollouts_generated"]
    before = sum(r["rollouts"] for r in trainer.ledger.records() if r["step"] < trainer.state.global_step - 1)
    assert before < 100 <= generated
    assert f"{generated} rollouts have been generated (budget_rollouts is 100)" in caplog.text
    assert "eval_rollwise/accuracy" in trainer.state.log_history[-2] | trainer.state.log_history[-1]
    assert list(tmp_path.glob("checkpoint-*/rollwise-*.arrow"))


# --- what is replayed ---------------------------------------------------------------------------------------------


class TrainerWithACritic(RollwiseGRPOTrainer):
    """Its critic finds long completions surprising."""

    def td_errors(self, output):
        return output["completion_mask"].sum(1).float() - 2.5


def test_td_errors_come_from_the_trainer(tmp_path):
    trainer = tiny.trainer(
        tmp_path, trainer_class=TrainerWithACritic, replay_ratio=1.0, replay_priority="td_error", max_steps=5
    )
    trainer.train()
    stored = trainer.scheduler.buffer.rollouts
    assert [r.td_error for r in stored] == [len(r.payload["completion_ids"]) - 2.5 for r in stored]
    values = trainer.scheduler.buffer._values_N[trainer.scheduler.buffer._held_slots()]
    assert values.tolist() == [abs(r.td_error) for r in stored]


def test_td_errors_that_nobody_gives_are_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match="'td_error', and nothing gives TD errors; override td_errors"):
        tiny.trainer(tmp_path, replay_ratio=0.5, replay_priority="td_error")


def test_replay_only_updates_pass_no_prompt_over(tmp_path):
    """Two epochs of 12 prompts, 2 a batch: 6 generate calls an epoch, each with one update more."""
    trainer = tiny.trainer(
        tmp_path,
        trainer_class=CountingTrainer,
        train_dataset=tiny.dataset(12),
        per_device_train_batch_size=16,
        replay_updates_per_fresh=1,
        replay_warmup_steps=0,
        max_steps=-1,
        num_train_epochs=2,
    )
    asked, ask = [], trainer.scheduler.ask

    def recording_ask(*args):
        requests = ask(*args)
        asked.extend(request.prompt_id for request in requests)
        return requests

    trainer.scheduler.ask = recording_ask
    trainer.train()
    assert trainer.state.global_step == 24
    replay_only = {record["step"] for record in trainer.ledger.records() if record["kind"] == "replayed"}
    assert trainer.completions == 8 * len(asked) == 16 * (24 - len(replay_only))
    assert set(asked) == set(range(12))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay_decay_tau_steps": 500.0}, "decay_tau_steps is 500.*decay has no effect"),
        ({"replay_decay_tau_steps": "500", "replay_max_age_steps": None}, "older than 6 steps"),
        ({"replay_priority": "abs_reward"}, "has priority 0 under 'abs_reward'.*wrong answers are never replayed"),
    ],
)
def test_settings_without_the_effect_they_seem_to_have_are_told_once(tmp_path, caplog, settings, message):
    with caplog.at_level(logging.WARNING, logger="rollwise"):
        tiny.trainer(tmp_path, max_steps=6, replay_ratio=0.5, per_device_train_batch_size=32, **settings).train()
    assert len(re.findall(message, caplog.text)) == 1


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"replay_ratio": 0.5},
        ALL,
        {
            "replay_ratio": 0.5,
            "replay_updates_per_fresh": 1,
            "replay_decay_tau_steps": "auto",
            "replay_max_age_kl": 0.1,
        },
        pytest.param(ALL | {"num_iterations": 2}, marks=pytest.mark.slow),
        pytest.param(ALL | {"replay_updates_per_fresh": 2, "max_survivor_age_steps": 9}, marks=pytest.mark.slow),
    ],
    ids=["replay", "all", "measured ages", "several updates per batch", "replay-only updates"],
)
def test_resumed_run_is_the_run_that_was_never_stopped(tmp_path, settings):
    whole = tiny.trainer(tmp_path / "whole", max_steps=8, **settings)
    whole.train()
    first = tiny.trainer(tmp_path / "parts", max_steps=8, save_strategy="steps", save_steps=3, **settings)
    first.train()
    assert torch.equal(weights(whole), weights(first))  # saving changes nothing
    checkpoint = tmp_path / "parts" / ("checkpoint-4" if "num_iterations" in settings else "checkpoint-3")
    resumed = tiny.trainer(tmp_path / "parts", max_steps=8, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(weights(whole), weights(resumed))
    assert resumed.ledger.records() == whole.ledger.records()
    assert [r.reward for r in resumed.scheduler.buffer.rollouts] == [r.reward for r in whole.scheduler.buffer.rollouts]


@pytest.mark.parametrize("allocation", ["pilot_commit", "belief", "history_skipping"])
def test_a_run_goes_on_with_a_data_set_that_has_grown_and_been_reordered(tmp_path, allocation):
    data = tiny.dataset(60).add_column("uid", [f"problem {i}" for i in range(60)])
    settings = {"allocation": allocation, "prompt_id_column": "uid", "replay_ratio": 0.5, "p_lower": 0.1}
    first = tiny.trainer(
        tmp_path, train_dataset=data.select(range(50)), max_steps=3, save_strategy="steps", save_steps=3, **settings
    )
    first.train()
    grown = tiny.trainer(tmp_path, train_dataset=data.shuffle(seed=3), max_steps=6, **settings)
    grown.train(resume_from_checkpoint=True)
    answers = dict(zip(data["uid"], data["prompt"], strict=True))
    for rollout in grown.scheduler.buffer.rollouts:
        assert tiny.tokenizer().decode(rollout.payload["prompt_ids"]) == answers[rollout.prompt_id]
    births = {rollout.birth_step for rollout in grown.scheduler.buffer.rollouts}
    assert min(births) < 3 <= max(births)  # of before and after
    with pytest.raises(StateError, match="1 of the 50 prompts of the saved state are not among the 59 of this run"):
        tiny.trainer(tmp_path, train_dataset=data.select(range(1, 60)), max_steps=6, **settings).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-3")
        )


def test_another_data_set_without_ids_of_its_own_is_refused(tmp_path):
    settings = ALL | {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    tiny.trainer(tmp_path, **settings).train()
    with pytest.raises(
        StateError, match="checkpoint-2 is of a run whose train_dataset had other prompts.*prompt_id_col"
    ):
        tiny.trainer(tmp_path, train_dataset=tiny.dataset().shuffle(seed=1), **settings).train(
            resume_from_checkpoint=True
        )


def test_buckets_of_a_column_reach_the_beliefs(tmp_path):
    data = tiny.dataset(20)
    data = data.add_column("level", [f"level {i % 3}" for i in range(20)])
    by_column = tiny.trainer(tmp_path, train_dataset=data, allocation="belief", belief_bucket_column="level")
    assert by_column.scheduler.allocator._bucket_P.tolist() == [i % 3 for i in range(20)]
    by_length = tiny.trainer(tmp_path, train_dataset=data, allocation="belief")
    lengths = [len(prompt) for prompt in data["prompt"]]
    assert by_length.scheduler.allocator._bucket_P.tolist() == [sorted(set(lengths)).index(n) for n in lengths]


def test_checkpoint_without_state_is_refused_before_training(tmp_path):
    trainer = tiny.trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, **ALL)
    trainer.train()
    for file in (tmp_path / "checkpoint-2").glob("rollwise-*"):
        file.unlink()
    with pytest.raises(StateError, match="checkpoint-2 holds no rollwise state.*earlier checkpoint"):
        tiny.trainer(tmp_path, max_steps=4, **ALL).train(resume_from_checkpoint=True)


def test_resume_without_any_checkpoint_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no whole checkpoint to resume from"):
        tiny.trainer(tmp_path / "empty").train(resume_from_checkpoint=True)
