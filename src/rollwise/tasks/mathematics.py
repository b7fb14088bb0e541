"""Mathematical problems with one answer, which math-verify compares in a process that can be killed."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from rollwise.errors import ConfigError
from rollwise.evaluation.benchmarks import INSTRUCTION
from rollwise.evaluation.verify import RIGHT, UNSCORED, MathVerifier, Verdict
from rollwise.tasks.environment import LanguageEnvironment, Observation, Outcome, Spec

__all__ = ["Mathematics", "math_reward"]


@dataclass(kw_only=True, eq=False)
class Mathematics(LanguageEnvironment):
    r"""Solve a problem; the final answer stands in `\boxed{}`, or where else math-verify finds one.

    The spec is `{"problem": "...", "answer": "..."}`, with `level` if there is one. Problems come from data: see
    `rollwise.tasks.questions`. A problem's pictures stand in the data set's row; they are no part of the spec.

    Args:
        max_turns: One: the first answer counts.
        malformed_reward: Reward of a text without an answer.
        right_reward: Reward of a right answer.
        wrong_reward: Reward of a wrong one.
    """

    max_turns: int = 1
    malformed_reward: float = 0.0
    right_reward: float = 1.0
    wrong_reward: float = 0.0

    name: ClassVar[str] = "math"
    may_hang: ClassVar[bool] = False  # math-verify may, but it is killed then

    @property
    def instructions(self) -> str:
        """How to answer."""
        return INSTRUCTION

    def draw_spec(self, level: str, rng: np.random.Generator) -> dict[str, Any]:
        """Refuse: the problems come from data.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("mathematical problems come from data: load them with rollwise.tasks.questions")

    def spec_of(self, question: str, answers: Sequence[str], level: str | None) -> dict[str, Any]:
        """Make a spec of a row of data, of whose answers the first one counts."""
        return {"problem": question, "answer": answers[0]} | ({} if level is None else {"level": level})

    def _begin(self, spec: Spec) -> Observation:
        for key in ("problem", "answer"):
            if not isinstance(spec.get(key), str) or not spec[key].strip():
                raise ConfigError(f"{key} is {spec.get(key)!r}; a spec of math needs it as a text")
        self._answer = str(spec["answer"])
        _verifier(self.timeout_seconds).start()  # which is not part of an answer's time
        return Observation(str(spec["problem"]))

    def _play(self, answer: str) -> Outcome:
        verdict = _verifier(self.timeout_seconds).verify(answer, self._answer)
        if verdict.verdict == UNSCORED:
            return Outcome(self._last, None, done=True, unscored=verdict.reason)
        if verdict.verdict == RIGHT:
            return Outcome(self._last, self.right_reward, done=True, is_success=True)
        if verdict.extracted is None:
            return Outcome(self._last, self.malformed_reward, done=True, is_malformed=True)
        return Outcome(self._last, self.wrong_reward, done=True)


def math_reward(completions: Sequence[Any], answer: Sequence[Any], **kwargs: object) -> list[float | None]:
    """Reward 1.0 for a right answer and 0.0 for a wrong one, in TRL's signature; None where that cannot be told.

    Args:
        completions: Generated texts, or conversations whose last message counts.
        answer: The right answers, one per rollout: the data set's column `answer`.
        kwargs: Everything else that TRL hands over; not used.

    Returns:
        One reward per rollout. Each takes 10 seconds at most.

    Raises:
        ConfigError: The two lists differ in length.
        VersionError: math-verify is not installed.
    """
    if len(completions) != len(answer):
        raise ConfigError(f"{len(completions)} completions but {len(answer)} answers; there must be one answer each")
    verifier = _verifier(10.0)
    verdicts = [verifier.verify(_text(text), str(right)) for text, right in zip(completions, answer, strict=True)]
    return [_score(verdict) for verdict in verdicts]


def _score(verdict: Verdict) -> float | None:
    return None if verdict.is_right is None else float(verdict.is_right)


def _text(completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    last: Mapping[str, Any] = completion[-1] if completion else {}
    content = last.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


@lru_cache(maxsize=8)
def _verifier(timeout_seconds: float) -> MathVerifier:
    """Return the one verifier of a time limit that all environments of this process share."""
    verifier = MathVerifier(timeout_seconds)
    atexit.register(verifier.close)
    return verifier
