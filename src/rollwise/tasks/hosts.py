"""Where the environments of a batch live: in this process, or in others that can be killed.

A host has numbered slots, each with one environment. Both kinds give the same observations and turns.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rollwise.child import Child
from rollwise.errors import ConfigError, RollwiseError
from rollwise.tasks.environment import LanguageEnvironment, Observation, Turn
from rollwise.tasks.worker import observation_from_json, turn_from_json

__all__ = ["Host", "InProcessHost", "KillableHost", "check_importable"]


class Host(Protocol):
    """Has environments in slots."""

    def begin(self, slot: int, spec: Mapping[str, Any], seed: int) -> Observation | str:
        """Start an episode; a text says why it cannot be scored. A wrong spec raises ConfigError."""
        ...

    def take_turn(self, slot: int, answer: str) -> Turn:
        """Take one turn."""
        ...

    def close(self) -> None:
        """Let go of the environments."""
        ...


class InProcessHost:
    """Environments in this process: as fast as they are, for those that are known not to hang."""

    def __init__(self, make: Callable[[], LanguageEnvironment]) -> None:
        self._make = make
        self._environments: dict[int, LanguageEnvironment] = {}

    def begin(self, slot: int, spec: Mapping[str, Any], seed: int) -> Observation | str:
        """Start an episode."""
        if slot not in self._environments:
            self._environments[slot] = self._make()
        try:
            return self._environments[slot].begin(spec, seed)
        except RollwiseError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a task's code raises makes this episode unscored
            return f"{type(error).__name__}: {error}"

    def take_turn(self, slot: int, answer: str) -> Turn:
        """Take one turn."""
        return self._environments[slot].take_turn(answer)

    def close(self) -> None:
        """Close the environments."""
        for environment in self._environments.values():
            environment.close()
        self._environments = {}


class KillableHost:
    """Environments in one process that is killed when one of them takes too long.

    The others in it are then set up again in a new process, by playing their answers once more; one whose course is
    not the same the second time becomes unscored.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], timeout_seconds: float) -> None:
        self._name, self._settings, self.timeout_seconds = name, dict(settings), timeout_seconds
        self._child: Child | None = None
        self._begun: dict[int, dict[str, Any]] = {}
        self._answers: dict[int, list[str]] = {}
        self._latest: dict[int, Observation] = {}
        self._lost: dict[int, str] = {}

    def begin(self, slot: int, spec: Mapping[str, Any], seed: int) -> Observation | str:
        """Start an episode."""
        self._begun.pop(slot, None)
        self._lost.pop(slot, None)
        request = {"slot": slot, "spec": spec, "seed": seed}
        reply = self._ask(request, slot)
        if isinstance(reply, str):
            return reply
        if "refused" in reply:
            raise ConfigError(reply["refused"])
        if "unscored" in reply:
            return str(reply["unscored"])
        self._begun[slot], self._answers[slot] = request, []
        self._latest[slot] = observation_from_json(reply["observation"])
        return self._latest[slot]

    def take_turn(self, slot: int, answer: str) -> Turn:
        """Take one turn."""
        latest = self._latest[slot]
        reply = self._lost.pop(slot, None) or self._ask({"slot": slot, "answer": answer}, slot)
        if isinstance(reply, str):
            return Turn(latest, None, truncated=True, unscored=reply)
        turn = turn_from_json(reply["turn"])
        self._latest[slot] = turn.observation
        self._answers[slot].append(answer)
        if turn.done:
            self._begun.pop(slot)
        return turn

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _ask(self, request: dict[str, Any], slot: int) -> dict[str, Any] | str:
        """Return the reply, or why there is none; after that the other episodes go on in a new process."""
        try:
            return self._started().ask(request, self.timeout_seconds)
        except TimeoutError:
            reason = f"it took more than timeout_seconds {self.timeout_seconds:g}, and its process was killed"
        except EOFError:
            reason = "the environment's process died"
        self.close()
        self._begun.pop(slot, None)
        self._restore()
        return reason

    def _restore(self) -> None:
        """Play the episodes that are under way once more, in a new process."""
        waiting = list(self._begun)
        while waiting:
            slot = waiting.pop(0)
            try:
                is_same = self._replay(slot)
            except (TimeoutError, EOFError):
                is_same = False
                self.close()
                waiting = [other for other in self._begun if other != slot]  # what was restored went with it
            if not is_same:
                self._begun.pop(slot)
                self._lost[slot] = "the process was killed for another episode, and this one did not go the same again"

    def _replay(self, slot: int) -> bool:
        """Play an episode once more, and tell whether that ends where it was."""
        child = self._started()
        reply = child.ask(self._begun[slot], self.timeout_seconds)
        for answer in self._answers[slot]:
            if reply.get("turn", {"unscored": None})["unscored"] is not None or {"refused", "unscored"} & reply.keys():
                return False
            reply = child.ask({"slot": slot, "answer": answer}, self.timeout_seconds)
        shown = reply["turn"]["observation"] if "turn" in reply else reply.get("observation")
        return shown is not None and _key(observation_from_json(shown)) == _key(self._latest[slot])

    def _started(self) -> Child:
        if self._child is None:
            arguments = (self._name, json.dumps(self._settings), str(math.ceil(self.timeout_seconds) + 5))
            path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
            self._child = Child("rollwise.tasks.worker", arguments, {"PYTHONPATH": path})
        return self._child


def _key(observation: Observation) -> tuple[Any, ...]:
    """Return something that is equal for equal observations."""
    return (observation.text, *((image.shape, image.tobytes()) for image in observation.images))


def check_importable(found: type[LanguageEnvironment], settings: Mapping[str, Any]) -> None:
    """Refuse what cannot be made in another process.

    Raises:
        ConfigError: The class is not one of a module, or the settings are not JSON-able.
    """
    if found.__module__ == "__main__" or "<locals>" in found.__qualname__:
        raise ConfigError(
            f"{found.__name__} may hang and so needs a process of its own, which cannot import it from here: put the "
            "class into a module, or set may_hang = False in it if every step is quick"
        )
    try:
        json.dumps(settings)
    except TypeError as error:
        raise ConfigError(
            f"settings {dict(settings)!r} cannot go to another process: {error}; use plain values"
        ) from None
