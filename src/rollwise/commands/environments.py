"""What a recipe's `environment` needs: its data set, its episodes and their reward.

Imports gymnasium and TRL inside the functions: reading the names of this module is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollwise.errors import RollwiseError
from rollwise.tasks import fictions
from rollwise.usage import UsageError, loading, one_line, require

if TYPE_CHECKING:
    from rollwise.commands.arguments import TrainArguments

#: Name of the environments' own reward.
EPISODE = "episode"


def load_levels(arguments: TrainArguments, *, evaluate: bool, seed: int) -> tuple[Any, Any | None]:
    """Load the levels to train on and, if `evaluate`, the held-out ones.

    Environments that make their levels take `environment_levels`; the others take questions from `dataset_name`.

    Raises:
        UsageError: There is no such environment, setting, level or source of questions.
    """
    from rollwise.tasks.levels import load_dataset, make_environment
    from rollwise.tasks.questions import load_questions

    name = arguments.environment or ""
    num_train, num_test = arguments.environment_train_rows, arguments.environment_test_rows
    with loading(f"environment {name!r}"):
        environment = make_environment(name, **environment_settings(arguments))
        if hasattr(environment, "spec_of"):
            splits = load_questions(
                environment, _questions(arguments), num_train=num_train, num_test=num_test, seed=seed
            )
        else:
            splits = load_dataset(
                environment,
                1_000 if num_train is None else num_train,
                128 if num_test is None else num_test,
                seed=seed,
                levels=arguments.environment_levels,
            )
    train, test = splits["train"], splits["test"] if evaluate else None
    if test is not None and len(test) == 0:
        raise UsageError(
            f"environment {name!r} has no held-out levels: set environment_test_rows to more than 0, or measure "
            "nothing with --eval_strategy no"
        )
    return train, test


def environment_settings(arguments: TrainArguments) -> dict[str, Any]:
    """The environment's settings; the corpus `fictions` is the embedded one, which is written if need be."""
    given = arguments.environment_kwargs
    settings = dict(given) if isinstance(given, dict) else {}
    if settings.get("corpus") == fictions.FICTIONS:
        settings["corpus"] = str(fictions.corpus_path())
    return settings


def _questions(arguments: TrainArguments) -> str:
    from rollwise.commands.sources import ARITHMETIC

    if arguments.dataset_name == ARITHMETIC:
        raise UsageError(
            f"environment {arguments.environment!r} takes its questions from data: set dataset_name to nq_open, gsm8k "
            "or the like, a hub name, or a .jsonl or .parquet file"
        )
    is_embedded = arguments.dataset_name == fictions.FICTIONS
    return str(fictions.questions_path()) if is_embedded else arguments.dataset_name


def episode_rollouts(arguments: TrainArguments) -> Any:
    """Make the `rollout_func` that plays the environment's episodes.

    Raises:
        UsageError: A package is missing, or a setting is out of its bounds.
    """
    require("gymnasium", extra="envs")
    from rollwise.trl.episodes import EpisodeRollouts

    try:
        return EpisodeRollouts(
            arguments.environment or "",
            max_episode_tokens=arguments.max_episode_tokens,
            **environment_settings(arguments),
        )
    except RollwiseError as error:
        raise UsageError(f"environment {arguments.environment!r}: {one_line(error)}") from None
