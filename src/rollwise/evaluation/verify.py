"""Right, wrong, or unscored: answers compared in a process that can be killed.

Math-verify limits its time by a signal, which works in a main thread alone; elsewhere its calls fail, and a reward made
of them is a silent 0 (Math-Verify issue 55, verl issue 5635). Here it has a process of its own, without that limit,
and the process is killed and replaced when an answer takes too long. Works from any thread.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol, Self

from rollwise.child import Child, ChildError
from rollwise.errors import ConfigError, RollwiseError, VersionError

RIGHT, WRONG, UNSCORED = "right", "wrong", "unscored"

_MEMORY_BYTES = 4 * 2**30


class VerifierError(RollwiseError, RuntimeError):
    """The process that verifies answers cannot be started."""


@dataclass(frozen=True)
class Verdict:
    """What became of one completion.

    Attributes:
        verdict: `right`, `wrong` or `unscored`.
        extracted: The answer that was found in it, as text; None where there is none.
        reason: Why it is unscored, or that no answer was found; None otherwise.
    """

    verdict: str
    extracted: str | None
    reason: str | None = None

    @property
    def is_right(self) -> bool | None:
        """True, False, or None for an unscored one."""
        return None if self.verdict == UNSCORED else self.verdict == RIGHT


class Verifier(Protocol):
    """What compares a completion with a right answer."""

    def verify(self, completion: str, answer: str) -> Verdict:
        """Compare one completion with the right answer."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class ExactVerifier:
    """The completion is the answer, character for character: what the embedded task asks for."""

    def verify(self, completion: str, answer: str) -> Verdict:
        """Compare two strings; nothing is ever unscored."""
        return Verdict(RIGHT if completion == answer else WRONG, completion)

    def close(self) -> None:
        """Do nothing."""


class MathVerifier:
    """Answers compared by math-verify, as mathematics, in a process of its own.

    The process is started at the first answer. One verifier can be shared by threads, which then wait for each other;
    a verifier per thread is faster.

    Args:
        timeout_seconds: Time limit of one answer, without the second or two that a new process takes to start.

    Raises:
        ConfigError: The time limit is not above 0.
        VersionError: math-verify is not installed.
    """

    def __init__(self, timeout_seconds: float = 10.0) -> None:
        if not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds is {timeout_seconds}, but must be above 0; 10 is a good value")
        if find_spec("math_verify") is None:
            raise VersionError("math-verify is not installed: pip install 'rollwise[eval]'")
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._child: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the process now, so that the first answer does not wait for it.

        Raises:
            VerifierError: The process cannot be started.
        """
        with self._lock:
            self._start()

    def verify(self, completion: str, answer: str) -> Verdict:
        r"""Compare a completion's final answer with the right answer.

        What stands in the last `\boxed`, if it is the right answer to the letter, is right without more ado. Otherwise
        math-verify looks for the final answer: after "final answer is", in the last `\boxed`, in the last formula, or
        the last number, in this order.

        Args:
            completion: The whole generated text.
            answer: The right answer, in LaTeX with or without `$`, or as a plain number or word.

        Returns:
            `wrong` also where the completion has no answer. `unscored` where the time ran out, the process died, the
            right answer cannot be read, or math-verify raised an error.

        Raises:
            VerifierError: The process cannot be started.
        """
        boxed = last_boxed(completion)
        if boxed is not None and boxed == answer.strip():
            return Verdict(RIGHT, boxed)
        with self._lock:
            reply = self._ask({"completion": completion, "answer": answer})
            if isinstance(reply, str):
                self._kill()
                return Verdict(UNSCORED, boxed, reply)
        if reply["right"] is None:
            return Verdict(UNSCORED, reply["extracted"], reply["reason"])
        return Verdict(RIGHT if reply["right"] else WRONG, reply["extracted"], reply["reason"])

    def close(self) -> None:
        """End the process. The next answer starts another."""
        with self._lock:
            self._kill()

    def _ask(self, request: dict[str, str]) -> dict[str, Any] | str:
        """Return the reply to a request, or why there is none."""
        try:
            return self._start().ask(request, self.timeout_seconds)
        except TimeoutError:
            return f"no verdict within {self.timeout_seconds:g} s"
        except EOFError:
            return "the verifying process died"

    def _start(self) -> Child:
        if self._child is None:
            last_resort = math.ceil(self.timeout_seconds) + 5
            try:
                self._child = Child("rollwise.evaluation.worker", (str(last_resort), str(_MEMORY_BYTES)))
            except ChildError as error:
                raise VerifierError(f"answers cannot be verified: {error}") from None
        return self._child

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}` of a text, without spaces around it; None where none is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[start + len("\\boxed{") : position].strip()
    return None


def make_verifier(name: str, timeout_seconds: float = 10.0) -> Verifier:
    """Return the verifier of a name, `math` or `exact`.

    Raises:
        ConfigError: Neither, or a time limit out of its bounds.
        VersionError: math-verify is not installed.
    """
    if name == "exact":
        return ExactVerifier()
    if name == "math":
        return MathVerifier(timeout_seconds)
    raise ConfigError(f"unknown verifier {name!r}: choose math (by math-verify) or exact (the same characters)")
