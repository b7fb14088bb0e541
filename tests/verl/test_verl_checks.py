"""What is refused before Ray starts. Needs neither verl nor Ray: a configuration is a mapping."""

import copy

import pytest

from rollwise import ConfigError, InexactSettingError
from rollwise.verl.checks import bypasses_recomputing, check_config, select, weighs_by_difference
from rollwise.verl.settings import RollwiseSettings

VERL = {
    "data": {"train_batch_size": 8},
    "actor_rollout_ref": {
        "actor": {
            "ppo_mini_batch_size": 8,
            "use_kl_loss": False,
            "entropy_coeff": 0,
            "loss_agg_mode": "token-mean",
            "loss_scale_factor": None,
            "policy_loss": {"loss_mode": "vanilla"},
        },
        "rollout": {"n": 8, "calculate_log_probs": True, "enable_rollout_routing_replay": False},
    },
    "algorithm": {
        "adv_estimator": "grpo",
        "use_kl_in_reward": False,
        "filter_groups": {"enable": False},
        "rollout_correction": {"bypass_mode": False, "rollout_is": None},
    },
    "reward": {"reward_model": {"enable": False, "enable_resource_pool": False}},
    "distillation": {"enabled": False},
    "skip": {"rollout_tq": {"enable": False}},
    "trainer": {
        "use_v1": True,
        "v1": {"trainer_mode": "sync", "sampler": {"custom_sampler": {"path": None}}},
    },
}
REPLAY = {"replay": {"ratio": 0.5}}
PILOT_COMMIT = {"allocation": {"name": "pilot_commit"}}


def verl(**changes):
    config = copy.deepcopy(VERL)
    for path, value in changes.items():
        *names, last = path.split("__")
        node = config
        for name in names:
            node = node[name]
        node[last] = value
    return config


def check(block, **changes):
    check_config(verl(**changes), RollwiseSettings.from_block(block))


@pytest.mark.parametrize("block", [{}, REPLAY, PILOT_COMMIT, REPLAY | PILOT_COMMIT])
def test_verls_defaults_are_fine(block):
    check(block)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer__v1__trainer_mode": "colocate_async"}, "trainer_mode='colocate_async'.*set it to sync"),
        ({"algorithm__adv_estimator": "rloo"}, "adv_estimator='rloo'"),
        ({"algorithm__use_kl_in_reward": True}, "use_kl_in_reward=True"),
        ({"algorithm__filter_groups__enable": True}, "name=dynamic_sampling"),
        ({"actor_rollout_ref__actor__policy_loss__loss_mode": "kl_cov"}, "loss_mode='kl_cov'"),
        ({"actor_rollout_ref__actor__loss_agg_mode": "token-sum"}, "loss_agg_mode='token-sum'"),
        ({"actor_rollout_ref__actor__use_kl_loss": True}, "use_kl_loss=True"),
        ({"actor_rollout_ref__actor__entropy_coeff": 0.01}, "entropy_coeff=0.01"),
        ({"actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_scale_factor is null"),
        ({"actor_rollout_ref__rollout__calculate_log_probs": False}, "calculate_log_probs is False"),
        ({"actor_rollout_ref__rollout__enable_rollout_routing_replay": True}, "routing of experts"),
        ({"distillation__enabled": True}, "teacher"),
        ({"skip__rollout_tq__enable": True}, "behind rollwise's back"),
        ({"trainer__v1__sampler__custom_sampler__path": "mine.py"}, "custom_sampler.path='mine.py'"),
        ({"reward__reward_model__enable": True}, "enable_resource_pool is False"),
    ],
)
def test_settings_that_would_make_replay_inexact_are_refused_but_not_where_nothing_is_on(changes, message):
    with pytest.raises(InexactSettingError, match=message):
        check(REPLAY, **changes)
    check({}, **changes)


@pytest.mark.parametrize(
    ("block", "changes", "message"),
    [
        ({}, {"trainer__use_v1": False}, "use_v1 is False"),
        (REPLAY, {"actor_rollout_ref__actor__ppo_mini_batch_size": 3}, "8 is no multiple of .* 3"),
        ({"replay": {"priority": "td_error"}}, {}, "there is no critic"),
        ({"replay": {"priority": "advantage"}}, {"algorithm__adv_estimator": "gae"}, "use 'td_error'"),
        (PILOT_COMMIT, {"algorithm__adv_estimator": "gae"}, "looks at groups"),
        (
            {"replay": {"decay_tau_steps": "auto"}},
            {"algorithm__rollout_correction__bypass_mode": True},
            "decay_tau_steps needs the measured staleness",
        ),
        (
            {"replay": {"max_age_kl": 0.1}},
            {"algorithm__rollout_correction__bypass_mode": True},
            "max_age_kl needs the measured staleness",
        ),
        (
            {"replay": {"updates_per_fresh": 4}, "allocation": {"name": "pilot_commit"}},
            {},
            "max_survivor_age_steps is 4, .* set it to at least 5",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(block, changes, message):
    with pytest.raises(ConfigError, match=message):
        check(block, **changes)


def test_a_critic_takes_a_priority_that_is_not_frozen_and_groups_of_one():
    block = {"replay": {"priority": "td_error"}}
    check(
        block, algorithm__adv_estimator="gae", actor_rollout_ref__rollout__n=1, actor_rollout_ref__actor__use_kl_loss=1
    )


def test_the_three_ways_to_correct_staleness_are_told_apart():
    assert not bypasses_recomputing(VERL)
    assert not weighs_by_difference(VERL)
    truncated = verl(algorithm__rollout_correction__rollout_is="token")
    assert weighs_by_difference(truncated)
    both = verl(algorithm__rollout_correction={"rollout_is": "token", "bypass_mode": True})
    assert bypasses_recomputing(both)
    assert not weighs_by_difference(both)


def test_a_setting_is_found_by_its_path():
    assert select(VERL, "data.train_batch_size") == 8
    assert select(VERL, "data.train_batch_size.more", "none") == "none"
    assert select(VERL, "algorithm.rollout_correction.rollout_is", "null counts as missing") == "null counts as missing"
