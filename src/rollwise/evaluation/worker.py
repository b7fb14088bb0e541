"""The process that runs math-verify, started by `verify.MathVerifier`: JSON lines in, JSON lines out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

from rollwise.child import serve


def main() -> None:
    """Answer each request `{"completion", "answer"}` with `{"right", "extracted", "reason"}`, until stdin ends."""
    seconds, num_bytes = int(sys.argv[1]), int(sys.argv[2])

    def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
        _limit_memory(num_bytes)
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        import math_verify  # noqa: F401 - loaded before the first request is timed

        return _answer

    serve(prepare, seconds)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return judge(request["completion"], request["answer"])
    except (Exception, RecursionError, MemoryError) as error:  # noqa: BLE001 - sent to the parent, which reports it
        return {"right": None, "extracted": None, "reason": f"math-verify failed: {type(error).__name__}"}


def judge(completion: str, answer: str) -> dict[str, Any]:
    """Compare a completion's final answer with the right answer; see `verify.MathVerifier.verify`."""
    from math_verify import parse, verify

    found = parse(completion, parsing_timeout=None, raise_on_error=True)
    # The last element is the text that was found; the ones before it are what that text means.
    extracted = next((str(part) for part in reversed(found) if isinstance(part, str)), None)
    if not found:
        return {"right": False, "extracted": None, "reason": "no answer found"}
    right = parse(answer if _is_marked(answer) else f"\\boxed{{{answer}}}", parsing_timeout=None, raise_on_error=True)
    failure = None
    for pair in product(right, found):
        try:
            if verify(*pair, timeout_seconds=None, raise_on_error=True):
                return {"right": True, "extracted": extracted, "reason": None}
        except (Exception, RecursionError, MemoryError) as error:  # noqa: BLE001 - another pair may still be equal
            failure = type(error).__name__
    if all(isinstance(part, str) for part in right):  # no mathematics in it, and the texts differ
        return {"right": None, "extracted": extracted, "reason": "the right answer cannot be read"}
    if failure is not None:
        return {"right": None, "extracted": extracted, "reason": f"the answers cannot be compared: {failure}"}
    return {"right": False, "extracted": extracted, "reason": None}


def _is_marked(answer: str) -> bool:
    return "\\boxed" in answer or "$" in answer.replace("\\$", "")


def _limit_memory(num_bytes: int) -> None:
    """Let an expression such as 9^9^9^9 fail in this process rather than take the machine's memory."""
    with suppress(ImportError, ValueError, OSError):  # no such limit on Windows, not all of them on macOS
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


if __name__ == "__main__":
    main()
