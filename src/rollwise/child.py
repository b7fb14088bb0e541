"""A process of one's own for code that may hang: JSON lines in, JSON lines out, killed when it takes too long.

A new interpreter rather than a fork: it needs nothing of this process, whose threads may hold any lock.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollwise.errors import RollwiseError

_SECONDS_TO_START = 120.0


class ChildError(RollwiseError, RuntimeError):
    """A process cannot be started."""


class Child:
    """A running process that answers requests, one at a time.

    Args:
        module: What it runs, a module that calls `serve`.
        arguments: Its arguments.
        environment: Variables that are set for it beside those of this process.

    Attributes:
        process: The process.

    Raises:
        ChildError: It did not start within two minutes.
    """

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} | dict(environment or {}),
        )
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_pass_on, args=(self.process, self._replies), daemon=True).start()
        try:
            is_ready = bool(self._replies.get(timeout=_SECONDS_TO_START))
        except queue.Empty:
            is_ready = False
        if not is_ready:
            self.kill()
            raise ChildError(f"a process did not start within {_SECONDS_TO_START:g} s: `{' '.join(command)}` shows why")

    def ask(self, request: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """Return the reply to a request.

        Raises:
            TimeoutError: There was none in time. The process must be killed: it may still be at it.
            EOFError: The process has died.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self._replies.get(timeout=timeout_seconds)
        except queue.Empty:
            raise TimeoutError from None
        except OSError:
            line = ""
        if not line:
            raise EOFError
        reply: dict[str, Any] = json.loads(line)
        return reply

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was still to be written has no reader
                    continue


def serve(prepare: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]], alarm_seconds: int) -> None:
    """Answer requests until stdin ends; what a module that `Child` runs calls.

    Args:
        prepare: Called once, before the first request is timed; returns what answers a request.
        alarm_seconds: Who started this process kills it when an answer takes too long. Should that process be gone
            itself, an alarm ends this one after so many seconds.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up among the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answer = prepare()
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _alarm(alarm_seconds)
        reply = answer(request)
        _alarm(0)
        _reply(replies, reply)


def _pass_on(process: subprocess.Popen[str], replies: queue.SimpleQueue[str]) -> None:
    """Put each line of a process into a queue, and an empty one at its end; a pipe itself has no limit to wait."""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            replies.put(line)
    except (OSError, ValueError):  # closed while it was read
        pass
    replies.put("")


def _alarm(seconds: int) -> None:
    """End this process in so many seconds, whatever it is doing; 0 calls that off."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _reply(replies: Any, content: dict[str, Any]) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()
