"""A study as its YAML file describes it: arms (methods with their settings) times seeds on one workload."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollwise.errors import ConfigError
from rollwise.records.recipe import pop_env, read_yaml
from rollwise.usage import suggestion

#: Fields of `rollwise train` that a study sets itself; those of a recipe file are passed over.
_SET_BY_STUDY = ("seed", "output_dir", "run_name", "overwrite", "resume_from_checkpoint", "baseline")
#: What a study needs is measured while a run goes on, so its weights are kept only if the settings say so.
_DEFAULTS: dict[str, Any] = {"save_strategy": "no", "save_model": False}
_KEYS = ("name", "seeds", "base", "recipe", "arms", "baseline", "target", "budget_rollouts", "per_seed")
_FOLDER_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class Run:
    """One arm with one seed.

    Attributes:
        arm: Name of the arm.
        seed: The run's seed.
        fields: All fields of its recipe, `seed` and `env` among them.
    """

    arm: str
    seed: int
    fields: Mapping[str, Any] = field(compare=False)

    @property
    def name(self) -> str:
        """`<arm>/seed-<n>`: what the run is called in messages, and its folder under the study's."""
        return f"{self.arm}/seed-{self.seed}"


@dataclass(frozen=True)
class Study:
    """A checked study.

    Attributes:
        name: Name of the study.
        seeds: Seeds that every arm is run with.
        arms: Fields of each arm's recipe, by its name; without what differs by seed.
        baseline: The arm that the others are compared with.
        target: Held-out accuracy that rollouts and seconds are counted to; None takes the default.
        budget_rollouts: Generated rollouts at which accuracies are compared; None takes the default.
        per_seed: Settings that differ by seed, as format strings with `{seed}`.
    """

    name: str
    seeds: tuple[int, ...]
    arms: Mapping[str, Mapping[str, Any]]
    baseline: str
    target: float | None = None
    budget_rollouts: tuple[int, ...] | None = None
    per_seed: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for what, name in (("name", self.name), *(("the name of an arm", arm) for arm in self.arms)):
            if not isinstance(name, str) or not _FOLDER_NAME.fullmatch(name):
                raise ConfigError(f"{what} is {name!r}; it names a folder: use letters, digits, '_', '-' and '.'")
        if not self.arms:
            raise ConfigError("arms is empty; name at least one, with the settings that make it")
        if not self.seeds or any(not _is_int(seed) or seed < 0 for seed in self.seeds):
            raise ConfigError(f"seeds is {list(self.seeds)}; give at least one whole number, each 0 or more")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds is {list(self.seeds)}; give each seed once: a repeated run tells nothing new")
        if self.baseline not in self.arms:
            raise ConfigError(f"baseline is {self.baseline!r}; name one of the arms: {', '.join(self.arms)}")
        if self.target is not None and (not _is_number(self.target) or not 0 < self.target <= 1):
            raise ConfigError(f"target is {self.target!r}; give a held-out accuracy above 0 and up to 1")
        grid = self.budget_rollouts
        if grid is not None and (
            not grid or any(not _is_int(n) or n <= 0 for n in grid) or list(grid) != sorted(set(grid))
        ):
            raise ConfigError(f"budget_rollouts is {list(grid)}; give whole numbers above 0, each larger than the last")
        for name, text in (self.per_seed or {}).items():
            if not isinstance(text, str) or "{seed" not in text:
                raise ConfigError(
                    f"per_seed: {name} is {text!r}; write a text with {{seed}} in it, or move it to recipe"
                )
            try:
                text.format(seed=self.seeds[0])
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"per_seed: {name} is {text!r}, which cannot be filled in ({error}); only {{seed}} is known"
                ) from None
        for arm, fields in self.arms.items():
            if fields.get("eval_strategy") in (False, "no"):
                raise ConfigError(
                    f"arm {arm}: eval_strategy is 'no'; a study needs held-out accuracies, set it to 'steps'"
                )

    def runs(self, arms: Collection[str] | None = None, seeds: Collection[int] | None = None) -> list[Run]:
        """Return the runs, all arms of the first seed first, so that a study cut short is balanced.

        Args:
            arms: Only these arms; None takes all.
            seeds: Only these seeds; None takes all.

        Raises:
            ConfigError: The study has no such arm or seed.
        """
        for what, chosen, known in (("arm", arms, list(self.arms)), ("seed", seeds, self.seeds)):
            for item in chosen or ():
                if item not in known:
                    raise ConfigError(f"the study has no {what} {item}; it has {', '.join(map(str, known))}")
        return [
            Run(arm, seed, fields | {k: v.format(seed=seed) for k, v in (self.per_seed or {}).items()} | {"seed": seed})
            for seed in self.seeds
            if not seeds or seed in seeds
            for arm, fields in ((arm, dict(fields)) for arm, fields in self.arms.items())
            if not arms or arm in arms
        ]


def read_study(path: Path) -> Study:
    """Read a study.

    An arm's fields are those of `base` (or of the arm's own `recipe:` file), then the study's `recipe:`, then the
    arm's; the later wins. Environment variables under `env` are merged by name.

    Args:
        path: YAML file with the keys `name`, `seeds`, `arms` and optionally `base`, `recipe`, `baseline`, `target`,
            `budget_rollouts` and `per_seed`. Paths of recipes are relative to it.

    Raises:
        UsageError: The file, or a recipe that it names, is missing or no mapping.
        ConfigError: A key or value is wrong.
    """
    content = read_yaml(path, "study")
    try:
        for key in content:
            if key not in _KEYS:
                raise ConfigError(f"unknown key {key!r}{suggestion(key, _KEYS)}; known are {', '.join(_KEYS)}")
        for key in ("name", "seeds", "arms"):
            if key not in content:
                raise ConfigError(f"{key} is missing; a study needs name, seeds and arms")
        common = _settings("recipe", content.get("recipe"))
        per_seed = _settings("per_seed", content.get("per_seed"))
        arms: dict[str, dict[str, Any]] = {}
        for arm, own in _mapping("arms", content["arms"]).items():
            own = _settings(f"arm {arm}", own)
            file = own.pop("recipe", content.get("base"))
            if file is not None and not isinstance(file, str):
                raise ConfigError(f"arm {arm}: the recipe's path is {file!r}; give the path of a .yaml file")
            recipe = read_yaml(path.parent / file) if file is not None else {}
            recipe = {name: value for name, value in recipe.items() if name not in _SET_BY_STUDY}
            arms[arm] = _merged(arm, _DEFAULTS, recipe, common, own)
        return Study(
            name=content["name"],
            seeds=_sequence("seeds", content["seeds"]),
            arms=arms,
            baseline=content.get("baseline", next(iter(arms), "")),
            target=content.get("target"),
            budget_rollouts=(
                None
                if content.get("budget_rollouts") is None
                else _sequence("budget_rollouts", content["budget_rollouts"])
            ),
            per_seed=per_seed,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _merged(arm: str, *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Put settings on top of each other, the variables under `env` one by one."""
    fields: dict[str, Any] = {}
    env: dict[str, str] = {}
    for layer in map(dict, layers):
        env |= pop_env(layer, f"arm {arm}")
        fields |= layer
    return fields | ({"env": env} if env else {})


def _settings(where: str, value: Any) -> dict[str, Any]:
    """Check a mapping of settings written in the study itself."""
    settings = _mapping(where, {} if value is None else value)
    for name in _SET_BY_STUDY:
        if name in settings:
            raise ConfigError(f"{where}: {name} is {settings[name]!r}, but the study sets it; remove the line")
    return settings


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where} is {value!r}; write one 'name: value' per line below it")
    return dict(value)


def _sequence(where: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} is {value!r}; write a list, such as [0, 1, 2]")
    return tuple(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
