"""The rollouts that a checkpoint's scheduler stores, as rows that a person or a data frame can read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwise.files import checkpoint_folders
from rollwise.replay import Replay, ReplayBuffer
from rollwise.rollout import Rollout
from rollwise.storage import load_state
from rollwise.usage import UsageError

#: Where verl's checkpoints are in a run's folder, and in them the scheduler's state, and beside it the tokenizer.
_VERL, _VERL_STATE, _VERL_TOKENIZER = "global_step_", "rollwise", Path("actor", "huggingface")


def stored_rows(folder: Path) -> list[dict[str, Any]]:
    """The stored rollouts of a checkpoint, or of a run's newest one, with their texts; the most drawn first.

    Raises:
        UsageError: There is no checkpoint there.
        StateError: Its state is damaged.
    """
    folder = find_checkpoint(folder)
    state = load_state(folder)
    return rows_of(folder, state, waiting_and_stored(state)[1])


def waiting_and_stored(state: dict[str, Any]) -> tuple[list[Rollout], list[Rollout]]:
    """Tell a state's rollouts apart: the pilots of survivors that wait, and what the replay buffer holds."""
    num_waiting = sum(size for _, _, size in state["waiting"])
    return state["rollouts"][:num_waiting], state["rollouts"][num_waiting:]


def rows_of(folder: Path, state: dict[str, Any], stored: list[Rollout]) -> list[dict[str, Any]]:
    """Return the stored rollouts of a state as rows, with their texts; the most drawn first."""
    decode = _decoder(folder)
    shares = _draw_shares(state, stored)
    rows = [
        _row(rollout, state["step"], decode) | {"draw_share": share}
        for rollout, share in zip(stored, shares, strict=True)
    ]
    rows.sort(key=lambda row: -abs(row["advantage"]) if row["draw_share"] is None else -row["draw_share"])
    return rows


def find_checkpoint(folder: Path) -> Path:
    """The folder with the scheduler's state: this one, or that of the checkpoint, or of the run's newest one.

    Raises:
        UsageError: There is none.
    """
    if not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is no folder; name a checkpoint's folder or a run's")
    for checkpoint in (folder, *checkpoint_folders(folder), *checkpoint_folders(folder, _VERL)):
        for found in (checkpoint, checkpoint / _VERL_STATE):
            if list(found.glob("rollwise-*.arrow")):
                return found
    raise UsageError(
        f"{str(folder)!r} holds no checkpoint with a scheduler's state; save some in training, with --save_strategy "
        "steps --save_steps 50, or trainer.save_freq=50 of verl"
    )


def _decoder(folder: Path) -> Any:
    """Token ids to text with the checkpoint's own tokenizer; None where it has none."""
    for place in (folder, folder.parent / _VERL_TOKENIZER):
        if (place / "tokenizer_config.json").exists():
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(place)
            return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    return None


def _draw_shares(state: dict[str, Any], stored: list[Rollout]) -> list[float] | list[None]:
    """Each stored rollout's probability to be in a draw of one unit; None if it cannot be known here."""
    saved = (state["buffer"] or {}).get("settings", {})
    if not stored or saved.get("priority") is None:
        return [None] * len(stored)
    buffer = ReplayBuffer.from_state(Replay(**saved), state["buffer"], stored)
    shares: list[float] = buffer.draw_probabilities().tolist()
    return shares


def _row(rollout: Rollout, step: int, decode: Any) -> dict[str, Any]:
    return {
        "prompt_id": rollout.prompt_id,
        "age_steps": step - rollout.birth_step,
        "birth_step": rollout.birth_step,
        "purpose": rollout.purpose,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "group_mean": rollout.group_mean,
        "group_std": rollout.group_std,
        "num_tokens": rollout.num_tokens,
        "nbytes": rollout.nbytes,
        "num_uses": rollout.num_uses,
        **_texts(rollout.payload or {}, decode),
    }


def _texts(payload: Mapping[str, NDArray[Any]], decode: Any) -> dict[str, str | None]:
    """Prompt and completion, as far as there are tokens; of verl's rollouts of several rows the first prompt."""
    prompt = payload.get("prompt_ids")
    completions = [payload["completion_ids"]] if "completion_ids" in payload else []
    if prompt is not None and "response_ids" in payload:
        prompt = prompt[: payload["prompt_lengths"][0]]
        completions = np.split(payload["response_ids"], np.cumsum(payload["response_lengths"])[:-1])
    return {
        "prompt": None if decode is None or prompt is None else decode(prompt.tolist()),
        "completion": "\n".join(decode(row.tolist()) for row in completions) if decode and completions else None,
    }
