"""Countdown: reach a target from given numbers with the four operations."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from rollwise.errors import ConfigError
from rollwise.tasks.actions import after_thinking, tagged
from rollwise.tasks.environment import LanguageEnvironment, Observation, Outcome, Spec

__all__ = ["Countdown", "evaluate_expression"]

_MAX_CHARACTERS = 200
_SIGNS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-"})
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def evaluate_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """Evaluate an expression of whole numbers, `+ - * /`, `× ÷` and brackets, exactly.

    The text is parsed into a syntax tree, of which only numbers and the four operations count; nothing is executed.

    Args:
        text: At most 200 characters; what follows a `=` is left out.

    Returns:
        The value and the numbers in it, in order; None where the text is no such expression, or divides by zero. Never
        raises on any text.
    """
    text = text.partition("=")[0].translate(_SIGNS).strip()
    if len(text) > _MAX_CHARACTERS or not re.fullmatch(r"[0-9+\-*/() ]+", text):
        return None
    numbers: list[int] = []
    try:
        return _value(ast.parse(text, mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


@dataclass(kw_only=True, eq=False)
class Countdown(LanguageEnvironment):
    """Reach the target with every number once.

    The answer is an expression such as `<answer>(25 - 7) * 4</answer>`, or bare. A level is written `numbers-<k>`, with
    `k` of 2 to 6 numbers. The spec is `{"numbers": [25, 7, 4], "target": 72}`. One that is made can always be reached.

    Args:
        max_turns: Attempts; after one that fails, the observation says what it came to.
        must_use_all: Whether every number must be used; otherwise each at most once.
        right_reward: Reward of an expression that reaches the target with the right numbers; it ends the episode.
        wrong_reward: Reward of any other expression.
        max_number: The largest number of levels that are made; targets are 1 to ten times as much.
    """

    max_turns: int = 1
    must_use_all: bool = True
    right_reward: float = 1.0
    wrong_reward: float = 0.0
    max_number: int = 99

    name: ClassVar[str] = "countdown"
    may_hang: ClassVar[bool] = False
    levels: ClassVar[tuple[str, ...]] = ("numbers-3", "numbers-4")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_number < 10:
            raise ConfigError(f"max_number is {self.max_number}; it must be at least 10, so that levels differ")

    @property
    def instructions(self) -> str:
        """The rules, and how to answer."""
        uses = "every number exactly once" if self.must_use_all else "each number at most once"
        return (
            f"Write an expression that is equal to the target. Use {uses}, with +, -, *, / and brackets. "
            "Answer in tags, for example <answer>(25 - 7) * 4</answer>."
        )

    def draw_spec(self, level: str, rng: np.random.Generator) -> dict[str, Any]:
        """Draw numbers, and a target that they reach by random operations.

        Raises:
            ConfigError: Not such a level.
        """
        match = re.fullmatch(r"numbers-([2-6])", level)
        if match is None:
            raise ConfigError(f"unknown level {level!r}: write 'numbers-2' to 'numbers-6'")
        while True:  # about every second draw gives a target in bounds
            numbers = [int(number) for number in rng.integers(1, self.max_number + 1, size=int(match[1]))]
            left = [Fraction(number) for number in numbers]
            while len(left) > 1:
                first, second = (left.pop(int(rng.integers(len(left)))) for _ in range(2))
                results = [first + second, first - second, first * second]
                if second and (first / second).denominator == 1:
                    results.append(first / second)
                left.append(results[int(rng.integers(len(results)))])
            if left[0].denominator == 1 and 0 < left[0] <= 10 * self.max_number:
                return {"numbers": numbers, "target": int(left[0])}

    def level_of(self, spec: Spec) -> str:
        """Name how many numbers there are, for example `numbers-3`."""
        return f"numbers-{len(spec['numbers'])}"

    def _begin(self, spec: Spec) -> Observation:
        numbers, target = spec.get("numbers"), spec.get("target")
        if not (isinstance(numbers, list | tuple) and numbers and all(_is_whole(number) for number in numbers)):
            raise ConfigError(f"numbers is {numbers!r}; it must be a list of whole numbers that are not negative")
        if not _is_whole(target):
            raise ConfigError(f"target is {target!r}; it must be a whole number that is not negative")
        self._numbers: Sequence[int] = numbers
        self._target = target
        self._question = f"Numbers: {', '.join(map(str, numbers))}. Target: {target}."
        return Observation(self._question)

    def _play(self, answer: str) -> Outcome:
        text = after_thinking(answer)
        content = tagged(text, "answer")
        found = evaluate_expression(text if content is None else content)
        if found is None:
            return self._malformed(("<answer>an expression</answer>",))
        value, used = found
        if self._is_allowed(used) and value == self._target:
            return Outcome(self._last, self.right_reward, done=True, is_success=True)
        came_to = f"That is {value}." if self._is_allowed(used) else "That does not use the numbers as it should."
        return Outcome(Observation(f"{came_to} {self._question}"), self.wrong_reward)

    def _is_allowed(self, used: Sequence[int]) -> bool:
        missing, extra = Counter(self._numbers), Counter(used)
        return not extra - missing and not (self.must_use_all and missing - extra)


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    """Return the value of a tree, and collect its numbers from left to right."""
    if isinstance(node, ast.Constant) and _is_whole(node.value):
        numbers.append(int(node.value))  # type: ignore[arg-type]
        return Fraction(numbers[-1])
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left = _value(node.left, numbers)
        return _OPERATIONS[type(node.op)](left, _value(node.right, numbers))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    raise ValueError
