"""What is refused before Ray starts, because the result would not be what the settings promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollwise.errors import ConfigError, InexactSettingError
from rollwise.replay.settings import AUTO
from rollwise.verl.settings import RollwiseSettings

#: Losses of verl that are linear in the advantage and have been compared with the reference.
LOSS_MODES = ("vanilla", "gspo", "cispo")
#: Ways to aggregate it: over tokens, and over rows.
TOKEN_MEANS = ("token-mean",)
ROW_MEANS = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"


def select(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """A setting by its dotted path; `default` where there is none or it is null."""
    node: Any = config
    for name in path.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return default
        node = node[name]
    return default if node is None else node


def is_critic(config: Mapping[str, Any]) -> bool:
    """Whether advantages come from a critic."""
    return bool(select(config, "algorithm.adv_estimator") == "gae")


def bypasses_recomputing(config: Mapping[str, Any]) -> bool:
    """Whether verl takes the rollout engine's log-probs for the ratio and does not compute its own."""
    return bool(select(config, f"{_CORRECTION}.bypass_mode", False))


def weighs_by_difference(config: Mapping[str, Any]) -> bool:
    """Whether verl's rollout correction weighs rows by their recomputed log-probs over the behaviour policy's."""
    return not bypasses_recomputing(config) and select(config, f"{_CORRECTION}.rollout_is") is not None


#: Settings of verl under which the gradient would not be the method's: (path, whether it is set so, why, remedy).
_INEXACT: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "trainer.v1.trainer_mode",
        lambda value: value != "sync",
        "in the asynchronous modes verl decides itself which prompts are in flight",
        "set it to sync",
    ),
    (
        "algorithm.adv_estimator",
        lambda value: value not in ("grpo", "gae"),
        "its advantages are not those that rollwise freezes",
        "use grpo, or gae with a critic",
    ),
    (
        "algorithm.use_kl_in_reward",
        bool,
        "the penalty changes with the policy, and rewards are frozen when a rollout is generated",
        "set it to False",
    ),
    (
        "algorithm.filter_groups.enable",
        bool,
        "verl's own dynamic sampling drops groups before rollwise sees them",
        "set it to False and use rollwise.allocation.name=dynamic_sampling",
    ),
    (
        f"{_ACTOR}.policy_loss.loss_mode",
        lambda value: value not in LOSS_MODES,
        "its exactness has not been shown",
        f"use one of {LOSS_MODES}",
    ),
    (
        f"{_ACTOR}.loss_agg_mode",
        lambda value: value not in TOKEN_MEANS + ROW_MEANS,
        "its normaliser is none that rollwise can keep right",
        f"use one of {TOKEN_MEANS + ROW_MEANS}",
    ),
    (
        "trainer.v1.sampler.custom_sampler.path",
        lambda value: value is not None,
        "a sampler of your own and rollwise both decide what a batch is made of",
        "unset it",
    ),
    (
        "skip.rollout_tq.enable",
        bool,
        "generation is skipped behind rollwise's back",
        "set it to False",
    ),
    (
        "distillation.enabled",
        bool,
        "the teacher's log-probs are not stored with the rollouts",
        "set it to False",
    ),
    (
        f"{_ROLLOUT}.enable_rollout_routing_replay",
        bool,
        "the routing of experts is not stored with the rollouts",
        "set it to False",
    ),
)


def check_config(config: Mapping[str, Any], settings: RollwiseSettings) -> None:
    """Refuse a configuration of verl that the settings of the `rollwise:` block do not go with.

    Args:
        config: verl's configuration, composed.
        settings: The block.

    Raises:
        ConfigError: If two settings contradict each other.
        InexactSettingError: If a setting of verl's would make replay or allocation inexact.
    """
    if not select(config, "trainer.use_v1", True):
        raise ConfigError("trainer.use_v1 is False; rollwise stands on verl's V1 trainer, set it to True")
    prompts, rollouts = select(config, "data.train_batch_size"), select(config, f"{_ROLLOUT}.n")
    if not settings.is_active:
        return
    if rollouts > 1 or not is_critic(config):
        settings.allocation_settings(prompts, rollouts)
    for path, is_set, reason, remedy in _INEXACT:
        value = select(config, path)
        if is_set(value):
            raise InexactSettingError(
                f"{path}={value!r} does not go with replay or allocation: {reason}; {remedy}, or turn replay and "
                "allocation off"
            )
    _check_rewards(config)
    _check_log_probs(config, settings)
    _check_loss(config, prompts)
    _check_critic(config, settings)
    _check_ages(settings)


def _check_rewards(config: Mapping[str, Any]) -> None:
    if select(config, "reward.reward_model.enable", False) and not select(
        config, "reward.reward_model.enable_resource_pool", False
    ):
        raise InexactSettingError(
            "reward.reward_model.enable_resource_pool is False: a reward model that shares the trainer's devices "
            "scores rollouts after the batch is complete, and rollwise decides by their rewards before; set it to "
            "True, use a reward function, or turn replay and allocation off"
        )


def _check_log_probs(config: Mapping[str, Any], settings: RollwiseSettings) -> None:
    if not select(config, f"{_ROLLOUT}.calculate_log_probs", False):
        raise InexactSettingError(
            f"{_ROLLOUT}.calculate_log_probs is False: the log-probs at generation, which correct the staleness of "
            "pilots and replayed rows, would be missing; set it to True"
        )
    replay = settings.replay_settings()
    measured = [name for name in ("max_age_kl", "decay_tau_kl") if getattr(replay, name) is not None]
    measured += ["decay_tau_steps"] if replay.decay_tau_steps == AUTO else []
    if measured and bypasses_recomputing(config):
        raise ConfigError(
            f"rollwise.replay.{measured[0]} needs the measured staleness, which bypass_mode=True of "
            "algorithm.rollout_correction leaves unmeasured; set it to False, or use clocks of steps"
        )


def _check_loss(config: Mapping[str, Any], prompts: int) -> None:
    mini = select(config, f"{_ACTOR}.ppo_mini_batch_size")
    if prompts % mini:
        raise ConfigError(
            f"data.train_batch_size {prompts} is no multiple of {_ACTOR}.ppo_mini_batch_size {mini}; the number of "
            "optimizer steps a batch is cut into is their quotient"
        )
    if select(config, f"{_ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm" and not select(
        config, f"{_ACTOR}.loss_scale_factor"
    ):
        raise InexactSettingError(
            f"{_ACTOR}.loss_scale_factor is null: the loss would be divided by the longest row of each micro-batch, "
            "which changes with replay; set it to data.max_response_length"
        )
    if is_critic(config):
        return
    for path in (f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.entropy_coeff"):
        if value := select(config, path):
            raise InexactSettingError(
                f"{path}={value!r} does not go with replay or allocation: the term acts on zero-variance rows too, "
                "which are left out of the batch; set it to 0 or False, or turn replay and allocation off"
            )


def _check_critic(config: Mapping[str, Any], settings: RollwiseSettings) -> None:
    priority = settings.replay_settings().priority
    if not is_critic(config):
        if settings.replay_settings().is_on and priority == "td_error":
            raise ConfigError(
                "rollwise.replay.priority is 'td_error', and there is no critic; set algorithm.adv_estimator to gae, "
                "or use another priority, such as 'advantage'"
            )
        return
    if settings.allocation_name != "uniform":
        raise ConfigError(
            f"rollwise.allocation.name is {settings.allocation_name!r}, which looks at groups, and with "
            "algorithm.adv_estimator=gae advantages come from a critic; use uniform, or grpo"
        )
    if priority in ("advantage", "positive_advantage", "group_std"):
        raise ConfigError(
            f"rollwise.replay.priority is {priority!r}, which is frozen with its group, and with "
            "algorithm.adv_estimator=gae advantages are computed anew at each use; use 'td_error', or 'abs_reward'"
        )


def _check_ages(settings: RollwiseSettings) -> None:
    """Replay-only updates count as steps, and pilots that were bound to the last commits wait for their end."""
    updates = settings.replay_settings().updates_per_fresh
    if settings.allocation_name != "pilot_commit" or not settings.allocation.get("bind_pilots", True):
        return
    bound = settings.allocation.get("max_survivor_age_steps", 4)
    if bound < 1 + updates:
        raise ConfigError(
            f"rollwise.allocation.max_survivor_age_steps is {bound}, and with updates_per_fresh {updates} of "
            f"rollwise.replay bound pilots are {1 + updates} steps old when they are used; set it to at least "
            f"{1 + updates}"
        )
