"""What is refused before any expensive work begins, because the result would not be what the settings promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import transformers
import trl
from datasets import Dataset
from packaging.version import Version
from transformers import ProcessorMixin
from trl import GRPOTrainer

from rollwise.bounds import check_at_least, check_choices
from rollwise.errors import ConfigError, InexactSettingError

if TYPE_CHECKING:
    from rollwise.trl.config import RollwiseGRPOConfig
    from rollwise.trl.trainer import RollwiseGRPOTrainer

#: Losses that divide by a number of rows (their mean over a micro-batch), and by a number of tokens.
ROW_MEAN_LOSSES = ("grpo", "dr_grpo", "sapo")
TOKEN_MEAN_LOSSES = ("dapo", "cispo")

#: Settings under which the gradient would not be the method's: (name, whether it is set so, why, alternative).
_INEXACT: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "loss_type",
        lambda args: args.loss_type not in ROW_MEAN_LOSSES + TOKEN_MEAN_LOSSES,
        "its normaliser depends on how rows fall into micro-batches, or its exactness has not been shown",
        f"use one of {ROW_MEAN_LOSSES + TOKEN_MEAN_LOSSES}",
    ),
    (
        "beta",
        lambda args: args.beta != 0.0,
        "the KL term acts on zero-variance rows too, which are left out of the batch",
        "set beta to 0.0",
    ),
    (
        "top_entropy_quantile",
        lambda args: args.top_entropy_quantile < 1.0,
        "the entropy quantile is taken over a micro-batch, whose rows change with replay",
        "set top_entropy_quantile to 1.0",
    ),
    (
        "entropy_coef",
        lambda args: getattr(args, "entropy_coef", 0.0) != 0.0 or getattr(args, "use_adaptive_entropy", False),
        "the entropy bonus acts on zero-variance rows too, which are left out of the batch",
        "set entropy_coef to 0.0 and use_adaptive_entropy to False",
    ),
    (
        "multi_objective_aggregation",
        lambda args: args.multi_objective_aggregation != "sum_then_normalize",
        "it normalises over the rollouts of one generate call, not over a joint group",
        "set multi_objective_aggregation to 'sum_then_normalize'",
    ),
    (
        "use_liger_kernel",
        lambda args: args.use_liger_kernel,
        "TRL's fused loss has its own normaliser",
        "set use_liger_kernel to False",
    ),
    (
        "auto_find_batch_size",
        lambda args: args.auto_find_batch_size,
        "a batch size that shrinks in mid-run cuts groups apart",
        "set auto_find_batch_size to False and lower per_device_train_batch_size",
    ),
)


def check_settings(args: RollwiseGRPOConfig) -> None:
    """Refuse settings that contradict each other, or that would make replay or allocation inexact.

    Raises:
        ConfigError: If a setting is out of its bounds.
        InexactSettingError: If a setting of TRL's would make replay or allocation inexact.
    """
    check_at_least(args, 1, "budget_rollouts", or_none=True)
    _check_correction(args)
    _check_ages(args)
    if args.is_active:
        for name, is_set, reason, alternative in _INEXACT:
            if is_set(args):
                raise InexactSettingError(
                    f"{name}={getattr(args, name)!r} cannot be exact with replay or allocation on: {reason}; "
                    f"{alternative}, or turn replay and allocation off"
                )


def _check_correction(args: RollwiseGRPOConfig) -> None:
    check_choices(args, replay_correction=("clip", "truncated", "sequence_mask", "none"))
    if not args.replay_truncation_cap > 0:
        raise ConfigError(f"replay_truncation_cap is {args.replay_truncation_cap}; it must be above 0")
    if not args.replay_mask_bound > 1:
        raise ConfigError(f"replay_mask_bound is {args.replay_mask_bound}; it must be above 1, which is no staleness")
    if args.replay_correction != "clip" and getattr(args, "off_policy_mask_threshold", None) is not None:
        raise InexactSettingError(
            f"off_policy_mask_threshold={args.off_policy_mask_threshold} looks at the ratio that replay_correction="
            f"{args.replay_correction!r} replaces; unset one of the two"
        )


def _check_ages(args: RollwiseGRPOConfig) -> None:
    """Ages count training steps, and one batch of rollouts may be trained on for several of them."""
    batches = args.steps_per_generation * args.num_iterations
    steps = -(-batches // args.gradient_accumulation_steps)
    reason = (
        f"one batch of rollouts is trained on for {steps} steps (steps_per_generation {args.steps_per_generation} "
        f"x num_iterations {args.num_iterations} / gradient_accumulation_steps {args.gradient_accumulation_steps})"
    )
    if args.replay_updates_per_fresh:
        reason += f", with {args.replay_updates_per_fresh} replay-only updates after it"
    bounds = {}
    if args.allocation == "pilot_commit" and args.bind_pilots:
        bounds["max_survivor_age_steps"] = args.max_survivor_age_steps, steps * (1 + args.replay_updates_per_fresh)
    if args.replay_settings().is_on and args.replay_max_age_steps is not None:
        bounds["replay_max_age_steps"] = args.replay_max_age_steps, steps
    for name, (bound, least) in bounds.items():
        if bound < least:
            raise ConfigError(
                f"{name} is {bound}, but {reason}: whatever is kept is too old at its first use; set {name} to at "
                f"least {least}"
            )


def check_eval_dataset(args: RollwiseGRPOConfig, eval_dataset: Any) -> None:
    """Refuse held-out data without the column that accuracies are told apart by.

    Raises:
        ConfigError: If there is no such column.
    """
    for dataset in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
        columns = getattr(dataset, "column_names", None)  # a stream may not know them
        if args.eval_accuracy_column is not None and columns and args.eval_accuracy_column not in columns:
            raise ConfigError(
                f"eval_accuracy_column is {args.eval_accuracy_column!r}, but eval_dataset has the columns "
                f"{', '.join(columns)}; name one of them"
            )


def check_model(trainer: RollwiseGRPOTrainer) -> None:
    """Refuse a model, a processor or a release of TRL with which replay or allocation would be inexact.

    Raises:
        ConfigError: If something is missing that the settings need.
        InexactSettingError: If model and settings together would make replay or allocation inexact.
    """
    if GRPOTrainer.__name__.startswith("Unsloth"):
        raise ConfigError(
            "Unsloth has replaced TRL's GRPOTrainer, which rollwise stands on; import rollwise.trl without Unsloth"
        )
    if not trainer.args.is_active:
        return
    from rollwise.trl.trainer import RollwiseGRPOTrainer  # which imports this module

    if trainer.args.replay_priority == "td_error" and type(trainer).td_errors is RollwiseGRPOTrainer.td_errors:
        raise ConfigError(
            "replay_priority is 'td_error', and nothing gives TD errors; override td_errors() in a subclass of "
            "RollwiseGRPOTrainer, or use another priority, such as 'advantage' or a function of your own"
        )
    if trainer.accelerator.gradient_accumulation_steps > 1:
        raise InexactSettingError(
            f"transformers {transformers.__version__} divides TRL's loss by gradient_accumulation_steps "
            f"{trainer.args.gradient_accumulation_steps} a second time; install transformers>=5.6, or set "
            "gradient_accumulation_steps to 1"
        )
    if isinstance(trainer.processing_class, ProcessorMixin):
        if Version(trl.__version__) < Version("1.11"):
            raise InexactSettingError(
                f"TRL {trl.__version__} mixes images up where prompts have several, or batches do not divide; "
                "install trl>=1.11, or turn replay and allocation off for vision-language models"
            )
        if (side := trainer._text_tokenizer.padding_side) != "left":
            raise InexactSettingError(
                f"the processor's tokenizer pads on the {side}, and TRL lays the marks of image tokens over "
                "prompts that it pads on the left; set processing_class.tokenizer.padding_side to 'left'"
            )
    if getattr(trainer, "aux_loss_enabled", False):
        raise InexactSettingError(
            "the load-balancing loss of this mixture-of-experts model acts on zero-variance rows too, which are "
            "left out of the batch; set router_aux_loss_coef to 0.0, or turn replay and allocation off"
        )


def check_dataset(args: RollwiseGRPOConfig, train_dataset: Any) -> None:
    """Refuse a data set that the settings cannot train on.

    Raises:
        ConfigError: If it is a stream where prompts are chosen, or smaller than a batch.
    """
    if args.allocation != "uniform" and not isinstance(train_dataset, Dataset):
        raise ConfigError(
            f"allocation={args.allocation!r} chooses prompts by their position, and train_dataset is a "
            f"{type(train_dataset).__name__}; give a datasets.Dataset, or use allocation='uniform'"
        )
    if isinstance(train_dataset, Dataset) and len(train_dataset) < args.train_prompts:
        raise ConfigError(
            f"train_dataset has {len(train_dataset)} prompts, one batch takes {args.train_prompts} "
            f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}); add "
            "prompts, or lower generation_batch_size or raise num_generations"
        )
