"""Refusing settings that are out of their bounds, in the same words everywhere."""

from __future__ import annotations

from typing import Any

from rollwise.errors import ConfigError


def check_at_least(settings: Any, least: int, *names: str, or_none: bool = False) -> None:
    """Refuse a setting below `least`; with `or_none` None is fine.

    Raises:
        ConfigError: If one of the settings of these names is.
    """
    for name in names:
        value = getattr(settings, name)
        if (value is not None or not or_none) and value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}{', or None' if or_none else ''}")


def check_share(settings: Any, *names: str, or_none: bool = False) -> None:
    """Refuse a setting that is not between 0 and 1; with `or_none` None is fine.

    Raises:
        ConfigError: If one of the settings of these names is.
    """
    for name in names:
        value = getattr(settings, name)
        if (value is not None or not or_none) and not 0 <= value <= 1:
            raise ConfigError(f"{name} is {value}; it must be between 0 and 1{', or None' if or_none else ''}")


def check_choices(settings: Any, **choices: tuple[str, ...]) -> None:
    """Refuse a setting that is none of its choices.

    Raises:
        ConfigError: If one of the settings is.
    """
    for name, known in choices.items():
        if getattr(settings, name) not in known:
            raise ConfigError(f"{name} is {getattr(settings, name)!r}; it must be one of {known}")
