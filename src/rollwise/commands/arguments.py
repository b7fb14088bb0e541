"""What a training run is asked to do: the recipe's fields, overridden by flags, checked and completed.

Imports TRL, torch and transformers: import it only once a run is to start.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trl import ModelConfig, TrlParser

from rollwise.commands.sources import ARITHMETIC
from rollwise.trl import RollwiseGRPOConfig
from rollwise.usage import UsageError, one_line, suggestion

#: Defaults of `rollwise train` that differ from TRL's: a run is measured from its start and shows every step.
_DEFAULTS: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_on_start": True,
    "eval_steps": 25,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "model_name_or_path": ARITHMETIC,
    "per_device_eval_batch_size": None,  # filled in by RecipeParser: as many as in training
}

_MANY = 12


@dataclass
class TrainArguments:
    """What `rollwise train` takes besides the fields of the trainer's and the model's configuration."""

    dataset_name: str = field(
        default=ARITHMETIC,
        metadata={
            "help": "'arithmetic' (embedded); mathematical problems by name, such as deepscaler, deepmath or gsm8k; a "
            "hub name, a folder, or a .jsonl, .json, .csv or .parquet file."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split of held-out problems."})
    dataset_test_rows: int = field(
        default=0,
        metadata={"help": "Hold out this many rows of the train split, for data without a test split."},
    )
    dataset_test_name: str | None = field(
        default=None,
        metadata={"help": "Mathematical problems by name: other ones to measure on, such as math500 or aime24."},
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "'arithmetic', 'math' (math-verify), one of TRL's such as accuracy_reward, or a dotted path to "
            "your own."
        },
    )
    reward_model_name_or_path: str | None = field(default=None, metadata={"help": "A reward model, added to them."})
    arithmetic_train_problems: int = field(default=8_000, metadata={"help": "Embedded data: problems to train on."})
    arithmetic_test_problems: int = field(default=256, metadata={"help": "Embedded data: held-out problems."})
    arithmetic_data_seed: int = field(default=0, metadata={"help": "Embedded data: seed of the train split."})
    arithmetic_levels: list[str] | None = field(
        default=None, metadata={"help": "Embedded data: levels such as sort-4 or add-2; all of them by default."}
    )
    arithmetic_test_levels: list[str] | None = field(
        default=None, metadata={"help": "Embedded data: levels of the held-out problems, if other than those."}
    )
    environment: str | None = field(
        default=None,
        metadata={
            "help": "Play episodes of this environment: frozen_lake, sokoban, cliff_walking, search_qa, math, "
            "countdown, or my_module:MyClass. Those that answer questions take them from dataset_name."
        },
    )
    environment_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Settings of the environment, as a mapping or as JSON: '{\"slippery\": true}'."},
    )
    environment_levels: list[str] | None = field(
        default=None, metadata={"help": "Levels of the environment, such as 4x4; its own ones by default."}
    )
    environment_train_rows: int | None = field(
        default=None,
        metadata={"help": "Levels to train on. None: 1,000, or all questions of the data set."},
    )
    environment_test_rows: int | None = field(
        default=None, metadata={"help": "Held-out levels. None: 128, or all held-out questions of the data set."}
    )
    max_episode_tokens: int | None = field(
        default=None,
        metadata={
            "help": "An episode is no longer than this, with its prompt; max_completion_length bounds one answer. "
            "None: as long as the model's positions reach."
        },
    )
    save_model: bool = field(default=True, metadata={"help": "Save the trained model in the run's folder at the end."})
    overwrite: bool = field(default=False, metadata={"help": "Delete an earlier run in the run's folder first."})
    baseline: bool = field(
        default=False, metadata={"help": "Afterwards run plain GRPO until it is as accurate, and compare."}
    )
    baseline_budget: float = field(
        default=3.0, metadata={"help": "Most rollouts of that plain run, as a multiple of the first run's."}
    )
    baseline_minutes: float | None = field(default=None, metadata={"help": "Most minutes of that plain run."})
    baseline_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of that plain run, if plain GRPO needs its own. None: the recipe's."},
    )

    def __post_init__(self) -> None:
        if isinstance(self.environment_kwargs, str):
            self.environment_kwargs = _mapping_of("environment_kwargs", self.environment_kwargs)
        for name in ("environment_kwargs", "environment_levels", "max_episode_tokens"):
            if getattr(self, name) is not None and self.environment is None:
                raise UsageError(f"{name} is set, but no environment: name one, or leave {name} out")
        for name in (
            "environment_train_rows",
            "arithmetic_train_problems",
            "baseline_budget",
            "baseline_minutes",
            "baseline_learning_rate",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} is {value}; it must be more than 0")
        for name in ("arithmetic_test_problems", "dataset_test_rows", "environment_test_rows"):
            if (getattr(self, name) or 0) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 0 or more")


def _mapping_of(name: str, text: str) -> dict[str, Any]:
    """Read a mapping that was given as JSON."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name} is {text!r}, which is no JSON ({error}); write '{{\"name\": value}}'") from None
    if not isinstance(found, dict):
        raise UsageError(f"{name} is {text!r}; write a mapping such as '{{\"slippery\": true}}'")
    return found


class Arguments(NamedTuple):
    """A parsed recipe with its flags; `settings` holds the fields that are not at their defaults, as given."""

    train: TrainArguments
    config: RollwiseGRPOConfig
    model: ModelConfig
    settings: dict[str, Any]


class RecipeParser(TrlParser):  # type: ignore[misc]
    """TRL's parser over our dataclasses; a wrong field or value raises a `UsageError` that says what is right.

    TRL's own takes a recipe's values unchecked and answers a wrong flag with the usage of all 200 of them.
    """

    def __init__(self, name: str) -> None:
        kinds = (TrainArguments, RollwiseGRPOConfig, ModelConfig)
        super().__init__(kinds, prog="rollwise train", allow_abbrev=False)
        self._name = name
        self._hints: dict[str, Any] = {}
        for kind in kinds:
            self._hints |= typing.get_type_hints(kind)
        self._defaults_of_classes = vars(super().parse_known_args([])[0])
        self.set_defaults(**_DEFAULTS)
        self._settings: dict[str, Any] = {}

    def take_recipe(self, fields: dict[str, Any], source: str) -> None:
        """Make a recipe's fields the defaults that flags may still override.

        Raises:
            UsageError: A field is unknown or its value is of the wrong kind.
        """
        actions: dict[str, argparse.Action] = {}
        for action in self._actions:
            actions.setdefault(action.dest, action)
        actions.pop("help", None)
        for name, value in fields.items():
            if name not in actions:
                raise UsageError(
                    f"{source}: unknown field {name!r}{suggestion(name, actions)} "
                    f"(`rollwise train --help` says which fields there are)"
                )
            try:
                value = self._checked(actions[name], value)
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                raise UsageError(f"{source}: {name} is {value!r}; {one_line(error)}") from None
            self.set_defaults(**{name: value})

    def parse(self, flags: list[str]) -> Arguments:
        """Parse flags on top of the recipe and build the three configurations.

        Raises:
            UsageError: An unknown flag, a wrong value, or values that a configuration refuses.
        """
        try:
            train, config, model, unknown = self.parse_args_into_dataclasses(
                flags, return_remaining_strings=True, look_for_args_file=False
            )
        except UsageError:
            raise
        except (ValueError, TypeError, ImportError) as error:
            raise UsageError(one_line(error)) from None
        if unknown:
            flag = unknown[0]
            name = flag.lstrip("-").split("=")[0].replace("-", "_")
            what, several = "unknown flag", ""
            if not flag.startswith("-"):
                what = "unexpected argument"
                several = "; several values of one field, such as report_to, go into the recipe as a list"
            raise UsageError(f"{what} {flag!r}{suggestion(name, self._hints)} (write --field value{several})")
        return Arguments(train, config, model, self._settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Fill in the defaults that depend on other fields, between parsing and building the configurations."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if namespace.per_device_eval_batch_size is None:
            namespace.per_device_eval_batch_size = namespace.per_device_train_batch_size
        if namespace.run_name is None:
            namespace.run_name = self._name
        if namespace.output_dir is None:
            folder = re.sub(r"[^\w.-]+", "_", namespace.run_name).lstrip(".")  # a name may hold a slash, a folder not
            namespace.output_dir = str(Path("runs") / (folder or self._name))
        if namespace.eval_strategy == "no":
            namespace.eval_on_start = False
        namespace.disable_tqdm = True
        defaults = self._defaults_of_classes
        self._settings = {key: value for key, value in vars(namespace).items() if value != defaults[key]}
        return namespace, unknown

    def error(self, message: str) -> typing.NoReturn:
        """Turn argparse's complaint about a flag into a `UsageError`."""
        found = re.match(r"argument (--\w+)\S*: (.*)", message, re.DOTALL)
        if found is None:
            raise UsageError(one_line(message))
        flag, complaint = found.groups()
        if wrong_kind := re.fullmatch(r"invalid (\w+) value: (.*)", complaint, re.DOTALL):
            complaint = f"{flag} is {wrong_kind[2]}; give {_in_words(wrong_kind[1])}"
        elif wrong_choice := re.match(r"invalid choice: '?(.*?)'? \(choose from", complaint, re.DOTALL):
            action = self._option_string_actions[flag]
            complaint = f"{flag} is {wrong_choice[1]!r}; {_choose(wrong_choice[1], action.choices or ())}"
        else:
            complaint = f"{flag}: {complaint}"
        raise UsageError(one_line(complaint))

    def _checked(self, action: argparse.Action, value: Any) -> Any:
        """Return a recipe's value as the field's type, or raise ValueError with what would be right."""
        hint = self._hints[action.dest]
        if value is None:
            if type(None) in typing.get_args(hint) or action.default is None:
                return None
            raise ValueError("give a value, or remove the line for the default")
        if value is False and action.choices is not None and "no" in action.choices:
            value = "no"  # YAML reads a bare `no` as false
        if isinstance(value, dict) or (isinstance(value, bool) and _allows(hint, bool)):
            if _allows(hint, type(value)):
                return value
            raise ValueError("give one value, not a mapping")
        if isinstance(value, list):
            if action.nargs == "+":
                return [_converted(action, item) for item in value]
            if _allows(hint, list):
                return value
            raise ValueError("give one value, not a list")
        if isinstance(value, bool) and _allows(hint, str):
            raise ValueError("YAML reads yes, no, on and off as true and false: put the word in quotes")
        converted = _converted(action, value)
        return [converted] if action.nargs == "+" else converted


def _allows(hint: Any, kind: type) -> bool:
    """Tell whether a type hint, or one of the alternatives in it, is `kind`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_allows(alternative, kind) for alternative in typing.get_args(hint))
    return kind in (hint, typing.get_origin(hint))


def _converted(action: argparse.Action, value: Any) -> Any:
    """Convert one scalar as argparse would convert the same text behind a flag."""
    convert: Any = action.type or str
    try:
        converted = convert(str(value))
    except (ValueError, TypeError):
        raise ValueError(f"give {_in_words(getattr(convert, '__name__', 'value'))}") from None
    if action.choices is not None and converted not in action.choices:
        raise ValueError(_choose(str(value), action.choices))
    return converted


def _in_words(kind: str) -> str:
    return {"int": "a whole number", "float": "a number", "str": "a text"}.get(kind, f"a {kind}")


def _choose(value: str, choices: Iterable[Any]) -> str:
    """List the choices, or of many the closest ones."""
    names = [str(choice) for choice in choices]
    if len(names) > _MANY:
        names = [*(difflib.get_close_matches(value, names, n=_MANY, cutoff=0.0)), "..."]
    return f"choose from {', '.join(names)}"


def parse_arguments(path: Path, fields: dict[str, Any], flags: list[str], **fixed: Any) -> Arguments:
    """Combine a recipe with flags.

    Args:
        path: The recipe's file; its stem names the run where `run_name` does not.
        fields: The recipe's fields, as `read_recipe` gives them.
        flags: `--field value` pairs from the command line.
        fixed: Fields that override both.

    Raises:
        UsageError: A field is unknown, or a value is wrong or refused.
    """
    parser = RecipeParser(path.stem)
    parser.take_recipe(fields, str(path))
    for name, value in fixed.items():
        flags = [*flags, f"--{name}", str(value)]
    return parser.parse(flags)
