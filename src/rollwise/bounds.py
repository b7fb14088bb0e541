"""Refusing settings that are out of their bounds, in the same words everywhere."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from rollwise.errors import ConfigError


def check_at_least(settings: Any, least: int, *names: str, or_none: bool = False) -> None:
    """Refuse a setting that is no whole number or below `least`; with `or_none` None is fine.

    Raises:
        ConfigError: If one of the settings of these names is.
    """
    for name in names:
        value = getattr(settings, name)
        if value is None and or_none:
            continue
        bound = f"at least {least}{', or None' if or_none else ''}"
        if not isinstance(value, Integral):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of {bound}")
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be {bound}")


def check_share(settings: Any, *names: str, or_none: bool = False) -> None:
    """Refuse a setting that is not between 0 and 1; with `or_none` None is fine.

    Raises:
        ConfigError: If one of the settings of these names is.
    """
    for name in names:
        value = getattr(settings, name)
        if value is None and or_none:
            continue
        if not is_number(value) or not 0 <= value <= 1:
            raise ConfigError(f"{name} is {value!r}; it must be between 0 and 1{', or None' if or_none else ''}")


def is_number(value: Any) -> bool:
    """Whether bounds can be looked at: texts of YAML and flags may stand where numbers belong."""
    return isinstance(value, Real)


def check_choices(settings: Any, **choices: tuple[str, ...]) -> None:
    """Refuse a setting that is none of its choices.

    Raises:
        ConfigError: If one of the settings is.
    """
    for name, known in choices.items():
        if getattr(settings, name) not in known:
            raise ConfigError(f"{name} is {getattr(settings, name)!r}; it must be one of {known}")
