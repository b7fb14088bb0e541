"""Where a run's problems, rewards and model come from: names in, objects out, a clear word where a name is wrong.

Imports `datasets` and TRL inside the functions: reading the names of this module is cheap.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollwise.commands.environments import EPISODE
from rollwise.tasks import agents, arithmetic
from rollwise.tasks.questions import SOURCES as QUESTIONS
from rollwise.tasks.questions import load_questions
from rollwise.usage import UsageError, loading, one_line, require, suggestion

if TYPE_CHECKING:
    from rollwise.commands.arguments import TrainArguments

#: Name of the embedded data set, of its reward and of its model.
ARITHMETIC = "arithmetic"

#: Name of the reward that math-verify gives, and mathematical problems by name.
MATH = "math"
SOURCES = tuple(name for name in QUESTIONS if name != "nq_open")

#: TRL's rewards that need no arguments, and how the one that does is called by TRL's own script.
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_OVERLONG = "get_soft_overlong_punishment"

_FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_problems(arguments: TrainArguments, *, evaluate: bool, seed: int) -> tuple[Any, Any | None]:
    """Load the problems to train on and, if `evaluate`, the held-out ones.

    Args:
        arguments: Which data set, and which of its splits.
        evaluate: Whether held-out problems are needed.
        seed: Picks the rows that `dataset_test_rows` holds out.

    Returns:
        Two `datasets.Dataset`; None for the second where nothing is evaluated.

    Raises:
        UsageError: There is no such data set, no such split, or no column `prompt`.
    """
    name = arguments.dataset_name
    if name in SOURCES:
        return _mathematics(arguments, evaluate=evaluate, seed=seed)
    if arguments.dataset_test_name is not None:
        raise UsageError(
            f"dataset_test_name is {arguments.dataset_test_name!r}, which goes with mathematical problems by name "
            f"({', '.join(SOURCES)}), and dataset_name is {name!r}; name a split with dataset_test_split"
        )
    is_embedded = name == ARITHMETIC
    splits = _arithmetic_splits(arguments) if is_embedded else _load_splits(name, arguments.dataset_config)
    train = _split(splits, name, arguments.dataset_train_split, "dataset_train_split")
    test = None
    if evaluate and arguments.dataset_test_rows:
        if arguments.dataset_test_rows >= len(train):
            raise UsageError(
                f"dataset_test_rows is {arguments.dataset_test_rows}, but {name!r} has {len(train)} rows: "
                f"hold out fewer, so that some are left to train on"
            )
        halves = train.train_test_split(test_size=arguments.dataset_test_rows, seed=seed)
        train, test = halves["train"], halves["test"]
    elif evaluate:
        test = _split(
            splits,
            name,
            arguments.dataset_test_split,
            "dataset_test_split",
            other=", or hold out rows with --dataset_test_rows 200, or measure nothing with --eval_strategy no",
        )
    for split in (train, test):
        if split is not None and "prompt" not in split.column_names:
            raise UsageError(
                f"data set {name!r} has no column 'prompt' (it has {', '.join(split.column_names)}): rename the "
                f"column that holds the question to 'prompt'; the other columns reach the reward function"
            )
        if split is not None and len(split) == 0:
            held_out = split is test
            raise UsageError(
                f"data set {name!r} has no {'held-out' if held_out else 'train'} problems: give it some"
                + (", or measure nothing with --eval_strategy no" if held_out else "")
            )
    return train, test


def _arithmetic_splits(arguments: TrainArguments) -> Any:
    levels = arguments.arithmetic_levels or arithmetic.DEFAULT_LEVELS
    try:
        return arithmetic.load_dataset(
            num_train=arguments.arithmetic_train_problems,
            num_test=arguments.arithmetic_test_problems,
            seed=arguments.arithmetic_data_seed,
            levels=levels,
            test_levels=arguments.arithmetic_test_levels,
        )
    except ValueError as error:
        raise UsageError(one_line(error)) from None


def _mathematics(arguments: TrainArguments, *, evaluate: bool, seed: int) -> tuple[Any, Any | None]:
    """Load public mathematical problems, and those of another such data set to measure on."""
    require("gymnasium", "math_verify", extra="envs")
    from rollwise.tasks.levels import make_environment

    with loading(f"data set {arguments.dataset_name!r} cannot be loaded"):
        splits = load_questions(
            make_environment(MATH),
            arguments.dataset_name,
            test_source=arguments.dataset_test_name,
            num_test=arguments.dataset_test_rows or None,
            seed=seed,
        )
    return splits["train"], splits["test"] if evaluate else None


def _load_splits(name: str, config: str | None) -> Any:
    """Load a file, a folder or a hub name through `datasets.load_dataset`."""
    import datasets

    path = Path(name).expanduser()
    kind = _FILE_FORMATS.get(path.suffix.lower())
    if kind is not None and not path.is_file():
        raise UsageError(f"no data file {name!r} (looked in {path.absolute().parent})")
    choices = f" (give 'arithmetic', a name on the hub, a folder, or a {', '.join(_FILE_FORMATS)} file)"
    with loading(f"data set {name!r} cannot be loaded", choices):
        try:
            if kind is not None:
                return datasets.load_dataset(kind, data_files=str(path))
            if (path / "dataset_dict.json").is_file():
                return datasets.load_from_disk(str(path))
            return datasets.load_dataset(str(path) if path.is_dir() else name, name=config)
        except StopIteration:  # what datasets makes of empty files, alone or in a folder
            raise UsageError(
                f"data {'set' if kind is None else 'file'} {name!r} has no rows: give it at least one"
            ) from None


def _split(splits: Any, name: str, split: str, flag: str, other: str = "") -> Any:
    if split not in splits:
        raise UsageError(
            f"data set {name!r} has no split {split!r} (it has {', '.join(splits)}): name one with --{flag}{other}"
        )
    return splits[split]


def load_rewards(names: Sequence[str] | None, reward_model: str | None, dataset_name: str) -> list[Any]:
    """Turn names of rewards into what TRL's trainer takes: functions, and names of reward models.

    Args:
        names: `arithmetic`, `math` (math-verify's verdict), names of TRL's rewards, dotted paths such as
            `my_module.my_reward` (looked up from the current folder too), or None for the data set's own.
        reward_model: A reward model's name or folder, put in front of them.
        dataset_name: `arithmetic` and `episode`, which stands for an environment's, have rewards of their own, and so
            have mathematical problems by name.

    Raises:
        UsageError: No reward at all, or a name that is not one.
    """
    if names is None:
        own = {ARITHMETIC: ARITHMETIC, EPISODE: EPISODE} | dict.fromkeys(SOURCES, MATH)
        names = [own[dataset_name]] if dataset_name in own else []
    rewards: list[Any] = [reward_model] if reward_model else []
    rewards += [_reward(name) for name in names]
    if not rewards:
        raise UsageError(
            f"no reward for data set {dataset_name!r}: set reward_funcs to one or more of {_reward_choices()}"
        )
    return rewards


def _reward_choices() -> str:
    names = ", ".join((ARITHMETIC, MATH, EPISODE, *TRL_REWARDS, _OVERLONG))
    return f"{names}, or a dotted path such as my_module.my_reward"


def _reward(name: str) -> Any:
    if name == ARITHMETIC:
        return arithmetic.exact_match_reward
    if name == EPISODE:
        from rollwise.trl.episodes import episode_reward

        return episode_reward
    if name == MATH:
        require("gymnasium", "math_verify", extra="envs")
        from rollwise.tasks.mathematics import math_reward

        return math_reward
    if name in TRL_REWARDS or name == _OVERLONG:
        from trl import rewards

        if name == _OVERLONG:
            return rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
        return getattr(rewards, name)
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        close = suggestion(name, (ARITHMETIC, MATH, EPISODE, *TRL_REWARDS, _OVERLONG))
        raise UsageError(f"unknown reward {name!r}{close}; choose from {_reward_choices()}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise UsageError(f"reward {name!r}: no module {error.name!r} in {here} or installed") from None
        raise UsageError(f"reward {name!r}: {module_name} itself needs {error.name!r}, which is missing") from None
    reward = getattr(module, attribute, None)
    if not callable(reward):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"reward {name!r}: no function {attribute!r} in {module_name} (it has {', '.join(functions)})")
    return reward


def model_source(name: str) -> str:
    """Return what `from_pretrained` takes: the embedded model's folder for `arithmetic`, else the name itself.

    Raises:
        UsageError: A path was given that is not a model's folder.
        ConfigError: The package lacks the embedded model.
    """
    if name == ARITHMETIC:
        return str(arithmetic.model_path())
    if name in agents.SHIPPED:
        return str(agents.agent_path(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
            raise UsageError(f"model folder {name!r} holds no config.json: give a folder that save_pretrained wrote")
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageError(f"no model folder {name!r} (looked at {path.absolute()})")
    return name
