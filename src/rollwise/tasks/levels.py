"""Environments by name, and data sets of levels to train and to measure on."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollwise.errors import ConfigError, VersionError
from rollwise.tasks import arithmetic

if TYPE_CHECKING:
    from rollwise.tasks.environment import LanguageEnvironment, Observation

__all__ = [
    "ENVIRONMENTS",
    "dataset_of",
    "draw_specs",
    "environment_class",
    "first_prompt",
    "is_held_out",
    "load_dataset",
    "make_environment",
    "prompt_id",
]

ENVIRONMENTS: dict[str, str] = {
    "frozen_lake": "rollwise.tasks.frozen_lake:FrozenLake",
    "sokoban": "rollwise.tasks.sokoban:Sokoban",
    "cliff_walking": "rollwise.tasks.cliff_walking:CliffWalking",
    "search_qa": "rollwise.tasks.search:SearchQA",
    "math": "rollwise.tasks.mathematics:Mathematics",
    "countdown": "rollwise.tasks.countdown:Countdown",
}
"""Name of each environment that comes with the package, and where its class is."""

_TEST_SEED = 20_240_607
_DRAWS_PER_LEVEL = 50


def environment_class(name: str) -> type[LanguageEnvironment]:
    """Return the class of a name of `ENVIRONMENTS`, or of `my_module:MyClass`.

    Raises:
        ConfigError: There is no such environment.
        VersionError: A package that it needs is not installed.
    """
    module, _, attribute = ENVIRONMENTS.get(name, name).partition(":")
    if not attribute:
        raise ConfigError(f"unknown environment {name!r}: choose {', '.join(ENVIRONMENTS)}, or write my_module:MyClass")
    from rollwise.tasks.environment import LanguageEnvironment

    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise ConfigError(f"environment {name!r} needs the module {error.name!r}, which cannot be found") from error
    if not (isinstance(found, type) and issubclass(found, LanguageEnvironment)):
        raise ConfigError(f"{attribute!r} of {module} is not a LanguageEnvironment: make it a subclass of it")
    return found


def make_environment(name: str, **settings: Any) -> LanguageEnvironment:
    """Make an environment by name.

    Args:
        name: As in `environment_class`.
        settings: Its settings, for example `slippery=True`.

    Raises:
        ConfigError: No such environment or setting, or a setting out of its bounds.
        VersionError: A package that it needs is not installed.
    """
    found = environment_class(name)
    known = [field.name for field in dataclasses.fields(found) if field.init]
    for setting in settings:
        if setting not in known:
            raise ConfigError(f"{name} has no setting {setting!r}; it has {', '.join(known)}")
    return found(**settings)


def prompt_id(name: str, spec: Mapping[str, Any]) -> str:
    """Return the id of a level, the same on every machine: the environment's name and a hash of the spec."""
    return f"{name}-{hashlib.blake2s(_canonical(spec).encode(), digest_size=8).hexdigest()}"


def is_held_out(spec: Mapping[str, Any]) -> bool:
    """Tell whether a level belongs to the test side: one in eight does, by `arithmetic.is_held_out` of its JSON."""
    return arithmetic.is_held_out(_canonical(spec))


def draw_specs(
    environment: LanguageEnvironment,
    num_specs: int,
    *,
    seed: int,
    levels: Sequence[str],
    split: Literal["train", "test"],
    on_found: Callable[[], object] | None = None,
) -> list[dict[str, Any]]:
    """Draw different levels at random, equally many of each name in `levels`.

    Args:
        environment: What the levels are for.
        num_specs: How many. Where it is not a multiple of the number of levels, the first get one more.
        seed: Same seed (and arguments), same specs in the same order.
        levels: What `environment.draw_spec` takes.
        split: Draw from the train or from the test side.
        on_found: Called after each one, to show progress.

    Returns:
        Specs in random order, none twice.

    Raises:
        ConfigError: A level has fewer specs than are asked for, there is no such level, or none is given.
    """
    if num_specs < 0:
        raise ConfigError(f"the number of levels is {num_specs}; it must be 0 or more")
    if not levels:
        raise ConfigError(f"levels is empty; name at least one, for example {list(environment.levels[:1])}")
    rng = np.random.default_rng(seed)
    specs: dict[str, dict[str, Any]] = {}
    for position, level in enumerate(levels):
        num_wanted = num_specs // len(levels) + (position < num_specs % len(levels))
        num_found, num_in_vain = 0, 0
        while num_found < num_wanted:
            spec = environment.draw_spec(level, rng)
            key = prompt_id(environment.name, spec)
            if key in specs or is_held_out(spec) != (split == "test"):
                num_in_vain += 1
                if num_in_vain > _DRAWS_PER_LEVEL * (num_wanted + 20):
                    raise ConfigError(
                        f"level {level!r} is exhausted: {num_wanted} levels wanted on the {split} side, {num_found} "
                        f"found in {num_in_vain + num_found} draws; ask for fewer, or use larger levels"
                    )
            else:
                specs[key] = spec
                num_found += 1
                if on_found is not None:
                    on_found()
    found = list(specs.values())
    return [found[i] for i in rng.permutation(len(found))]


def first_prompt(
    environment: LanguageEnvironment,
    observation: Observation,
    *,
    as_messages: bool = True,
    with_instructions: bool = True,
) -> str | list[dict[str, str]]:
    """Make the prompt of an episode from its first observation.

    Args:
        environment: Has the instructions.
        observation: The first observation.
        as_messages: A `system` and a `user` message, for models with a chat template; else plain text, the two with an
            empty line between them and a line break after each.
        with_instructions: Whether the instructions are part of it; small models that know nothing else need none.
    """
    instructions = environment.instructions if with_instructions else ""
    if as_messages:
        system = [{"role": "system", "content": instructions}] if instructions else []
        return [*system, {"role": "user", "content": observation.text}]
    return f"{instructions}\n\n{observation.text}\n" if instructions else f"{observation.text}\n"


def dataset_of(
    environment: LanguageEnvironment,
    specs: Sequence[Mapping[str, Any]],
    *,
    as_messages: bool = True,
    with_instructions: bool = True,
) -> Any:
    """Make a data set of levels.

    Returns:
        A `datasets.Dataset` with one row per spec and the columns `prompt`, `prompt_id`, `task` (the environment's
        name), `level` (a bucket of difficulty), `spec` (as JSON), and in the picture version `images`: one list of
        pictures per row, those of the first observation.

    Raises:
        ConfigError: A spec is not one of this environment.
        VersionError: There are pictures, and pillow is not installed.
    """
    import datasets

    if environment.picture:
        try:
            from PIL import Image
        except ImportError as error:
            raise VersionError("pictures need pillow: pip install 'rollwise[envs]'") from error
    columns: dict[str, list[Any]] = {key: [] for key in ("prompt", "prompt_id", "task", "level", "spec")}
    images: list[list[Any]] = []
    for spec in specs:
        observation = environment.begin(spec, seed=0)
        columns["prompt"].append(
            first_prompt(environment, observation, as_messages=as_messages, with_instructions=with_instructions)
        )
        columns["prompt_id"].append(prompt_id(environment.name, spec))
        columns["task"].append(environment.name)
        columns["level"].append(environment.level_of(spec))
        columns["spec"].append(json.dumps(spec, ensure_ascii=False))
        if environment.picture:
            images.append([Image.fromarray(image) for image in observation.images])
    if not environment.picture:
        return datasets.Dataset.from_dict(columns)
    return datasets.Dataset.from_dict(columns | {"images": images}).cast_column(
        "images", datasets.List(datasets.Image())
    )


def load_dataset(
    environment: LanguageEnvironment,
    num_train: int = 1_000,
    num_test: int = 128,
    seed: int = 0,
    levels: Sequence[str] | None = None,
    *,
    as_messages: bool = True,
    with_instructions: bool = True,
) -> Any:
    """Make the data set for a training run, for environments whose levels are drawn.

    Args:
        environment: What the levels are for.
        num_train: Size of the `train` split.
        num_test: Size of the `test` split: levels that no train split ever has.
        seed: Changes the train split only, so that runs with different seeds are measured on the same levels.
        levels: Names of levels, equally many rows of each; None takes the environment's own `levels`.
        as_messages: See `first_prompt`.
        with_instructions: See `first_prompt`.

    Returns:
        A `datasets.DatasetDict` with the splits `train` and `test`; columns as in `dataset_of`.

    Raises:
        ConfigError: As `draw_specs`; or the environment's problems come from data.
    """
    import datasets

    names = environment.levels if levels is None else levels
    if levels is None and not names:
        raise ConfigError(f"{environment.name} takes its problems from data; see its module for how to load them")
    with datasets.utils.tqdm(total=num_train + num_test, desc="Drawing levels", unit="level", delay=2) as progress:
        sides = {
            "train": draw_specs(
                environment, num_train, seed=seed, levels=names, split="train", on_found=progress.update
            ),
            "test": draw_specs(
                environment, num_test, seed=_TEST_SEED, levels=names, split="test", on_found=progress.update
            ),
        }
    return datasets.DatasetDict(
        {
            side: dataset_of(environment, specs, as_messages=as_messages, with_instructions=with_instructions)
            for side, specs in sides.items()
        }
    )


def _canonical(spec: Mapping[str, Any]) -> str:
    return json.dumps(spec, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
