"""A simulation as its YAML file, or a command line, describes it."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rollwise.allocation import ALLOCATIONS, Allocation
from rollwise.errors import ConfigError
from rollwise.records.recipe import read_yaml
from rollwise.simulation.rates import PRESETS, Rates
from rollwise.simulation.run import EngineName, build_allocation
from rollwise.usage import UsageError, require, suggestion

DEFAULT_PROMPTS = 10_000
DEFAULT_BUDGET_ROLLOUTS = 1_000_000
#: Names of the column of rates, and of the two columns of counts.
_RATE, _CORRECT, _TOTAL = ("rate", "success_rate", "p"), ("correct", "successes"), ("total", "rollouts", "n")


@dataclass(frozen=True)
class Simulation:
    """A checked simulation.

    Attributes:
        prompts: Prompts in the pool (P); None: as many as the file of rates has, else 10,000.
        rates: Name of a preset, or path of a file of success rates; see `read_rates`.
        bins: A histogram in place of `rates`; see `rollwise.simulation.rates.parse_bins`.
        train_prompts: Prompts trained on per step.
        group_size: Rollouts of a trained group.
        methods: Allocations with their settings, by the name they get; the first is the baseline. A method's
            `allocation` is its name where it is left out.
        steps: Most steps.
        budget_rollouts: Most rollouts of a run; None: 1,000,000 where there are no steps either.
        target: Mean success rate that rollouts are counted to; a run ends there. None: the highest that all runs reach.
        seeds: Seeds that every method is run with; they draw decisions and rewards. The pool is the same for all.
        gain_per_group: See `rollwise.simulation.policy.SimulatedPolicy`.
        critical_groups: See there.
        forgetting: See there.
        patience_prompts: A run ends after so many prompts in a row without a gradient; 0: never.
        engine: See `rollwise.simulation.run.simulate`.
    """

    prompts: int | None = None
    rates: str = "rlvr"
    bins: str | None = None
    train_prompts: int = 128
    group_size: int = 16
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"uniform": {}, "pilot_commit": {}})
    steps: int | None = None
    budget_rollouts: int | None = None
    target: float | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    gain_per_group: float = 1e-4
    critical_groups: float | None = None
    forgetting: float = 0.0
    patience_prompts: int = 1000
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        for name in ("prompts", "train_prompts", "group_size", "steps", "budget_rollouts"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} is {value!r}; give a whole number of at least 1")
        for name in ("gain_per_group", "critical_groups", "forgetting", "target"):
            value = getattr(self, name)
            if not isinstance(value, int | float | None) or isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}; give a number (YAML reads 1e-4 as a text: write 1.0e-4)")
        if not self.seeds or any(not isinstance(seed, int) or seed < 0 for seed in self.seeds):
            raise ConfigError(f"seeds is {list(self.seeds)}; give at least one whole number, each 0 or more")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds is {list(self.seeds)}; give each seed once: a repeated run tells nothing new")
        if not self.methods:
            raise ConfigError(f"methods is empty; name at least one of {', '.join(ALLOCATIONS)}")
        self.allocations()

    def allocations(self) -> dict[str, Allocation]:
        """The methods' allocations by their names.

        Raises:
            ConfigError: A method has an unknown allocation or setting, or a value out of its bounds.
        """
        built = {}
        for method, settings in self.methods.items():
            name = settings.get("allocation", method)
            own = {key: value for key, value in settings.items() if key != "allocation"}
            try:
                built[method] = build_allocation(
                    name, own, train_prompts=self.train_prompts, group_size=self.group_size
                )
            except ConfigError as error:
                raise ConfigError(f"method {method}: {error}") from None
        return built

    def success_rates(self) -> Rates:
        """The distribution of success rates.

        Raises:
            UsageError: A file is missing or cannot be read.
            ConfigError: The rates are out of bounds.
        """
        if self.bins is not None:
            return Rates.bins(self.bins)
        return Rates.preset(self.rates) if self.rates in PRESETS else read_rates(Path(self.rates))

    def options(self, seed: int) -> dict[str, Any]:
        """Arguments of `simulate` for a seed."""
        budget = self.budget_rollouts
        if budget is None and self.steps is None:
            budget = DEFAULT_BUDGET_ROLLOUTS
        names = ("steps", "target", "gain_per_group", "critical_groups", "forgetting", "patience_prompts", "engine")
        return {name: getattr(self, name) for name in names} | {"budget_rollouts": budget, "seed": seed}


def read_simulation(path: Path | None, overrides: Mapping[str, Any]) -> Simulation:
    """Read a simulation: the fields of `Simulation` in a YAML file, and over them those of a command line.

    A file of rates that the YAML file names is looked for beside it.

    Raises:
        UsageError: The file is missing or no mapping.
        ConfigError: A field is unknown or wrong.
    """
    content = read_yaml(path, "simulation") if path is not None else {}
    known = [field.name for field in fields(Simulation)]
    for name in content:
        if name not in known:
            raise ConfigError(f"{path}: unknown field {name!r}{suggestion(name, known)}; known are {', '.join(known)}")
    rates = content.get("rates")
    if path is not None and isinstance(rates, str) and rates not in PRESETS:
        content["rates"] = str(path.parent / rates)
    if "rates" in overrides:
        content.pop("bins", None)
    settings = content | dict(overrides)
    if "seeds" in settings:
        if not isinstance(settings["seeds"], list | tuple):
            raise ConfigError(f"seeds is {settings['seeds']!r}; write a list, such as [0, 1, 2]")
        settings["seeds"] = tuple(settings["seeds"])
    methods = settings.get("methods", {"uniform": {}, "pilot_commit": {}})
    if isinstance(methods, list):
        methods = {name: {} for name in methods}
    if not isinstance(methods, dict) or not all(isinstance(m, dict | None) for m in methods.values()):
        raise ConfigError(f"methods is {methods!r}; write a list of allocations, or one 'name: settings' per line")
    settings["methods"] = {str(name): dict(own or {}) for name, own in methods.items()}
    for name in ("rates", "bins"):
        if not isinstance(settings.get(name), str | None):
            raise ConfigError(f"{name} is {settings[name]!r}; give a text")
    return Simulation(**settings)


def parse_methods(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read the methods of a command line: `pilot_commit`, or with settings `pilot_commit:pilot_rollouts=8,p_lower=0.2`.

    A method is called like its allocation; where two have the same one, by its whole text.

    Raises:
        UsageError: A setting is not of the form name=value.
    """
    names = Counter(text.partition(":")[0] for text in texts)
    methods = {}
    for text in texts:
        name, _, rest = text.partition(":")
        settings: dict[str, Any] = {"allocation": name}
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            if not equals:
                raise UsageError(f"method {text!r}: {part!r} is no setting; write {name}:setting=value,setting=value")
            try:
                settings[key.strip()] = json.loads(value)
            except json.JSONDecodeError:
                settings[key.strip()] = {"True": True, "False": False, "None": None}.get(value, value)
        methods[name if names[name] == 1 else text] = settings
    return methods


def read_rates(path: Path) -> Rates:
    """Read success rates from a .csv, .json, .jsonl or .parquet file with one row per prompt.

    Either a column of rates (`rate`, `success_rate` or `p`), or counts of pilot rollouts (`correct` and `total`; also
    `successes`, and `rollouts` or `n`), of which the rates are estimated. JSON may also be a plain list of rates.

    Raises:
        UsageError: The file is missing, of another kind, or has none of these columns.
        ConfigError: A value is out of its bounds.
    """
    if not path.is_file():
        raise UsageError(f"rates is {str(path)!r}; there is no such file, and the presets are {', '.join(PRESETS)}")
    try:
        columns = _columns(path)
        found = {name: next((c for c in names if c in columns), None) for name, names in _WANTED.items()}
        if found["rate"] is not None:
            return Rates.listed([float(value) for value in columns[found["rate"]]])
        if found["correct"] is not None and found["total"] is not None:
            counts = [[float(value) for value in columns[str(found[name])]] for name in ("correct", "total")]
            return Rates.counted(*counts)
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError | UsageError):
            raise type(error)(f"{path}: {error}") from None
        raise UsageError(f"{path} cannot be read ({error}); give one row of numbers per prompt") from None
    raise UsageError(
        f"{path} has the columns {sorted(columns)}; name one {', '.join(_RATE)}, or two of them correct and total"
    )


_WANTED = {"rate": _RATE, "correct": _CORRECT, "total": _TOTAL}


def _columns(path: Path) -> dict[str, list[Any]]:
    kind = path.suffix.lower()
    if kind == ".parquet":
        require("pyarrow")
        import pyarrow.parquet as pq

        wanted = [name for names in _WANTED.values() for name in names]
        names = pq.read_schema(path).names
        chosen = [name for name in names if name in wanted]
        return {name: list[Any]() for name in names} | dict(pq.read_table(path, columns=chosen).to_pydict())
    text = path.read_text(encoding="utf-8")
    if kind == ".csv":
        rows: Any = list(csv.DictReader(text.splitlines()))
    elif kind == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    elif kind == ".json":
        rows = json.loads(text)
    else:
        raise UsageError(f"it ends in {kind!r}; give a .csv, .json, .jsonl or .parquet file")
    if isinstance(rows, dict):
        return rows
    if rows and not isinstance(rows[0], dict):
        return {"rate": rows}
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
