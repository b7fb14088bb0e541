"""Estimates as cells of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def estimate(figure: Mapping[str, Any], number: Callable[[float], str], *, interval: bool) -> str:
    """Write what `rollwise.study.aggregate` found: a bound's sign, the value and, if asked for, the interval."""
    text = number(figure["value"]) if figure["bound"] == "=" else f"{figure['bound']} {number(figure['value'])}"
    return f"{text} [{number(figure['low'])}, {number(figure['high'])}]" if interval else text


def count(value: float) -> str:
    """Write a whole number."""
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    """Write a ratio with two digits after the point."""
    return f"{value:.2f}"
