"""verl's rows as flat arrays, and flat arrays as rows again.

One session of verl's agent loop is one rollout. It gives one row, or several where the loop starts its context anew;
their key is `{uid}_{session}_{index}`. What is stored of a rollout (`Rollout.payload`) is a mapping from names to
one-dimensional arrays, its rows one after the other and without padding:

    prompt_lengths, response_lengths   tokens of each row, shape (rows,)
    num_turns                          of each row, shape (rows,)
    prompt_ids                         shape (all prompt tokens,)
    response_ids, response_mask        shape (all response tokens,); the mask is 0 where a tool has written
    rollout_log_probs                  the behaviour policy's, as the rollout engine returned them
    old_log_probs                      the same as the trained model computed them, once it has
    scores                             of each row's last token, shape (rows,)
    token_scores                       in place of `scores`, where other tokens have some: shape (all response tokens,)
    media. ..., position_ids           of rows with images, video or audio; see `rollwise.verl.media`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollwise.errors import InexactSettingError, RolloutError
from rollwise.verl.media import media_of_rows, media_to_arrays, positions_of_rows

RowArrays = dict[str, NDArray[Any]]

#: Fields of verl's rows that are read.
FIELDS = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "num_turns")
#: Further fields, which hold something where there are images, video or audio.
READ_FIELDS = (*FIELDS, "multi_modal_inputs", "position_ids")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rollout stands in a batch.

    Attributes:
        uid: Of its group in this batch.
        session: Its number within the group.
        version: Of the weights that generated it, as verl counts them.
        age_steps: Its age.
        advantage: Its advantage, for the sign.
    """

    uid: str
    session: int
    version: int
    age_steps: int
    advantage: float

    def keys(self, num_rows: int) -> list[str]:
        """The keys of its rows."""
        return [f"{self.uid}_{self.session}_{index}" for index in range(num_rows)]


def split_key(key: str) -> tuple[str, int, int]:
    """A row's key as (uid, session, index).

    Raises:
        RolloutError: If it is none.
    """
    parts = key.rsplit("_", 2)
    if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
        raise RolloutError(f"{key!r} is no key of verl's; it must be <uid>_<session>_<index>")
    return parts[0], int(parts[1]), int(parts[2])


def sessions(keys: Iterable[str]) -> dict[tuple[str, int], list[str]]:
    """Keys by (uid, session), those of one session by their index."""
    found: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for key in keys:
        uid, session, index = split_key(key)
        found.setdefault((uid, session), []).append((index, key))
    return {name: [key for _, key in sorted(members)] for name, members in found.items()}


def to_arrays(rows: Sequence[Mapping[str, Any]]) -> RowArrays:
    """The rows of one session as arrays.

    Args:
        rows: Their fields, `READ_FIELDS`, in order.

    Raises:
        InexactSettingError: If they hold what cannot be stored, or lack log-probs.
    """
    if any(row.get("rollout_log_probs") is None for row in rows):
        raise InexactSettingError(
            "a rollout came without the log-probs of its tokens, which correct its staleness; set "
            "actor_rollout_ref.rollout.calculate_log_probs to True, or let the agent loop return response_logprobs"
        )
    scores = [_to_numpy(row["rm_scores"], np.float32) for row in rows]
    arrays: RowArrays = {
        "prompt_lengths": np.array([len(row["prompts"]) for row in rows], dtype=np.int32),
        "response_lengths": np.array([len(row["responses"]) for row in rows], dtype=np.int32),
        "num_turns": np.array([int(row["num_turns"]) for row in rows], dtype=np.int32),
        "prompt_ids": np.concatenate([_to_numpy(row["prompts"], np.int32) for row in rows]),
        "response_ids": np.concatenate([_to_numpy(row["responses"], np.int32) for row in rows]),
        "response_mask": np.concatenate([_to_numpy(row["response_mask"], np.uint8) for row in rows]),
        "rollout_log_probs": np.concatenate([_to_numpy(row["rollout_log_probs"], np.float32) for row in rows]),
    }
    if any(score[:-1].any() for score in scores):
        arrays["token_scores"] = np.concatenate(scores)
    else:
        arrays["scores"] = np.array([score[-1] for score in scores], dtype=np.float32)
    return arrays | media_to_arrays(rows)


def _to_numpy(value: torch.Tensor, dtype: Any) -> NDArray[Any]:
    return value.detach().cpu().numpy().astype(dtype)  # a copy: a view would keep the whole batch in memory


def to_rows(arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """The rows again, as verl's agent loop writes them, in the same fields for all rows.

    Returns:
        Per row, its fields but for `uid`; `input_ids` and, of text, `position_ids` are derived.
    """
    prompts = _pieces(arrays["prompt_ids"], arrays["prompt_lengths"])
    lengths = arrays["response_lengths"]
    responses, masks = _pieces(arrays["response_ids"], lengths), _pieces(arrays["response_mask"], lengths)
    log_probs = _pieces(arrays["rollout_log_probs"], lengths)
    num_tokens = (arrays["prompt_lengths"] + lengths).tolist()
    media, positions = media_of_rows(arrays, num_tokens), positions_of_rows(arrays, num_tokens)
    rows = []
    for i, (prompt, response, mask) in enumerate(zip(prompts, responses, masks, strict=True)):
        prompt_T, response_T = torch.from_numpy(prompt).long(), torch.from_numpy(response).long()
        mask_T = torch.from_numpy(mask).long()
        rows.append(
            {
                "prompts": prompt_T,
                "responses": response_T,
                "response_mask": mask_T,
                "loss_mask": mask_T,
                "input_ids": torch.cat([prompt_T, response_T]),
                "position_ids": positions[i],
                "rollout_log_probs": torch.from_numpy(log_probs[i]),
                "rm_scores": torch.from_numpy(_scores(arrays, i)),
                "num_turns": int(arrays["num_turns"][i]),
                "multi_modal_inputs": media[i],
            }
        )
    return rows


def _scores(arrays: Mapping[str, NDArray[Any]], row: int) -> NDArray[np.float32]:
    if "token_scores" in arrays:
        return _pieces(arrays["token_scores"], arrays["response_lengths"])[row]
    scores_T = np.zeros(int(arrays["response_lengths"][row]), dtype=np.float32)
    scores_T[-1] = arrays["scores"][row]
    return scores_T


def pieces(arrays: Mapping[str, NDArray[Any]], name: str) -> list[NDArray[Any]]:
    """An array over response tokens, cut into rows."""
    return _pieces(arrays[name], arrays["response_lengths"])


def _pieces(array: NDArray[Any], lengths: NDArray[Any]) -> list[NDArray[Any]]:
    return np.split(array, np.cumsum(lengths)[:-1])


def behaviour_log_probs(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Log-probs of the policy that generated the rollout, shape (all response tokens,).

    The trained model's own where it computed them while that policy was current; else what the rollout engine
    returned. Never those of a later policy.
    """
    return arrays["old_log_probs"] if "old_log_probs" in arrays else arrays["rollout_log_probs"]


def stored_nbytes(num_rows: int, prompt_tokens: int, response_tokens: int, *, with_old_log_probs: bool) -> int:
    """Bytes of a rollout's arrays, known before they are made: for the buffer's byte cap.

    4 bytes a prompt token (its id), 9 a response token (id, mask, log-prob), 13 with the trained model's log-probs as
    well, and 16 a row. Without images, video and audio.
    """
    return 16 * num_rows + 4 * prompt_tokens + (13 if with_old_log_probs else 9) * response_tokens


def nbytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Bytes of a rollout's arrays."""
    return sum(array.nbytes for array in arrays.values())


def tag(prompt_tokens: int, response_tokens: int, version: int) -> dict[str, Any]:
    """The tag of a row, as verl's agent loop writes it.

    Args:
        prompt_tokens: Of the row.
        response_tokens: Of the row.
        version: Of the weights that generated it, as verl counts them: finished steps.
    """
    return {
        "status": "success",
        "prompt_len": prompt_tokens,
        "response_len": response_tokens,
        "seq_len": prompt_tokens + response_tokens,
        "global_steps": version + 1,
        "min_global_steps": version,
        "max_global_steps": version,
    }
