"""Writes some held-out episodes of every evaluation; see `rollwise.records.episodes`.

Imports transformers: import it only once a run is to start.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rollwise.files import replacing
from rollwise.records.episodes import read_episodes

_PER_EVALUATION = 3
_MOST_BYTES = 8 * 1024**2


class EpisodeLog(TrainerCallback):  # type: ignore[misc]
    """Writes the first episodes of each evaluation: every time of the same levels, with the same chance.

    Once the file holds 8 MB, nothing is added.

    Args:
        path: The file; None where another process writes.
        rollouts: What plays the trainer's episodes: an `EpisodeRollouts`.
    """

    def __init__(self, path: Path | None, rollouts: Any) -> None:
        self._path = path
        self._rollouts = rollouts
        self._first: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start, or go on, at a step: episodes after it, of a run that was cut off, are dropped."""
        if self._path is not None:
            kept = [row for row in read_episodes(self._path) if row["step"] <= state.global_step]
            with replacing(self._path) as partial:
                partial.write_text("".join(json.dumps(row) + "\n" for row in kept if state.global_step), "utf-8")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the episodes of an evaluation's first batch, of different levels."""
        if not self._first:
            every = max(1, args.num_generations_eval or args.num_generations)
            self._first = list(self._rollouts.episodes[::every][:_PER_EVALUATION])

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write them."""
        episodes, self._first = self._first, []
        if self._path is None or (self._path.is_file() and self._path.stat().st_size > _MOST_BYTES):
            return
        with self._path.open("a", encoding="utf-8") as file:
            for episode in episodes:
                file.write(json.dumps({"step": state.global_step} | record(episode)) + "\n")


def record(episode: Any) -> dict[str, Any]:
    """An `Episode` as JSON-able values."""
    turns = [
        {"text": observation.text, "images": [_data_uri(image) for image in observation.images]}
        for observation in episode.observations
    ]
    for turn, answer, reward in zip(turns, episode.texts, episode.rewards, strict=False):
        turn |= {"answer": answer, "reward": reward}
    return {
        "reward": episode.reward,
        "success": episode.is_success,
        "ended_by": episode.ended_by,
        "unscored": episode.unscored,
        "turns": turns,
    }


def _data_uri(image: Any) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
