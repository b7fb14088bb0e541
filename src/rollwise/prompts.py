"""What the scheduler needs to know of a data set: prompt ids, whether it has changed, and buckets of like prompts."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from rollwise.allocation.buckets import buckets_of
from rollwise.errors import ConfigError
from rollwise.rollout import PromptId

if TYPE_CHECKING:
    from datasets import Dataset


def prompt_ids(dataset: Dataset, column: str | None) -> list[PromptId]:
    """The ids of a data set's prompts: its row numbers, or a column of stable ids.

    Raises:
        ConfigError: If there is no such column.
    """
    return list(range(len(dataset))) if column is None else _column(dataset, column, "prompt_id_column")


def prompts_digest(dataset: Dataset, prompt_column: str = "prompt") -> str:
    """A checksum of the prompts in their order."""
    digest = hashlib.sha256()
    for prompt in dataset[prompt_column]:
        digest.update(_text(prompt).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def prompt_buckets(dataset: Dataset, column: str | None, prompt_column: str = "prompt") -> list[int]:
    """A bucket of each prompt: of a column's values, or of the lengths of the prompts in characters.

    Raises:
        ConfigError: If there is no such column.
    """
    if column is None:
        values = [len(_text(prompt)) for prompt in dataset[prompt_column]]
    else:
        values = _column(dataset, column, "belief_bucket_column")
    buckets: list[int] = buckets_of(values).tolist()
    return buckets


def _column(dataset: Dataset, column: str, setting: str) -> list[Any]:
    if column not in dataset.column_names:
        raise ConfigError(
            f"{setting} is {column!r}, and train_dataset has the columns {dataset.column_names}; name one"
        )
    return list(dataset[column])


def _text(prompt: Any) -> str:
    """A prompt, plain or conversational, as text; images count by their place alone."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, default=lambda value: type(value).__name__)
