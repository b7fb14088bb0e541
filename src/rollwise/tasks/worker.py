"""The process that runs environments that may hang, started by `batch.EnvironmentBatch`: JSON lines in and out."""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from rollwise.child import serve
from rollwise.errors import RollwiseError
from rollwise.tasks.environment import LanguageEnvironment, Observation, Turn
from rollwise.tasks.levels import make_environment


def main() -> None:
    """Answer `{"slot", "spec", "seed"}` with an observation and `{"slot", "answer"}` with a turn, until stdin ends."""
    name, settings, alarm_seconds = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    environments: dict[int, LanguageEnvironment] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        slot = request["slot"]
        if "answer" in request:
            return {"turn": turn_to_json(environments[slot].take_turn(request["answer"]))}
        try:
            if slot not in environments:
                environments[slot] = make_environment(name, **settings)
            observation = environments[slot].begin(request["spec"], request["seed"])
        except RollwiseError as error:
            return {"refused": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever a task's code raises makes this episode unscored
            return {"unscored": f"{type(error).__name__}: {error}"}
        return {"observation": observation_to_json(observation)}

    def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
        make_environment(name, **settings)  # its imports are not part of the first request's time
        return answer

    serve(prepare, alarm_seconds)


def observation_to_json(observation: Observation) -> dict[str, Any]:
    """Write an observation; images as base64 of their bytes, with their shapes."""
    images = [[image.shape, base64.b64encode(image.tobytes()).decode()] for image in observation.images]
    return {"text": observation.text, "images": images}


def observation_from_json(content: dict[str, Any]) -> Observation:
    """Read an observation; its images cannot be written to."""
    images = (np.frombuffer(base64.b64decode(data), np.uint8).reshape(shape) for shape, data in content["images"])
    return Observation(content["text"], tuple(images))


def turn_to_json(turn: Turn) -> dict[str, Any]:
    """Write a turn."""
    scalars = {field.name: getattr(turn, field.name) for field in dataclasses.fields(turn)}
    return scalars | {"observation": observation_to_json(turn.observation)}


def turn_from_json(content: dict[str, Any]) -> Turn:
    """Read a turn."""
    return Turn(**content | {"observation": observation_from_json(content["observation"])})


if __name__ == "__main__":
    main()
