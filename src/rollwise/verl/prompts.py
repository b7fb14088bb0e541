"""verl's data set as the scheduler knows it: an id a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollwise.errors import ConfigError
from rollwise.prompts import prompt_buckets, prompt_ids, prompts_digest
from rollwise.rollout import PromptId
from rollwise.verl.settings import RollwiseSettings


class Prompts:
    """The prompts that there are to choose from.

    Args:
        dataset: verl's training data set.
        config: verl's configuration.
        settings: The `rollwise:` block.

    Attributes:
        are_chosen: Whether the scheduler chooses a step's prompts. If not, verl's data loader does, and a prompt's id
            is its place in the batch.
        ids: Of all prompts.
        buckets: Which prompts are alike, where the allocation asks for that.

    Raises:
        ConfigError: If there are fewer prompts than a batch takes, or they are to be chosen and have no columns.
    """

    def __init__(self, dataset: Any, config: Any, settings: RollwiseSettings) -> None:
        per_step = int(config.data.train_batch_size)
        if len(dataset) < per_step:
            raise ConfigError(
                f"the data set has {len(dataset)} prompts, and data.train_batch_size is {per_step}; add prompts, or "
                "lower data.train_batch_size"
            )
        self._dataset, self._settings, self._prompt_column = dataset, settings, config.data.prompt_key
        self.are_chosen = settings.allocation_name != "uniform"
        self.ids: list[PromptId] = list(range(per_step))
        self.buckets: Sequence[int] | None = None
        if self.are_chosen:
            self.ids = prompt_ids(self._table, settings.prompt_id_column)
            if settings.allocation_name == "belief":
                self.buckets = prompt_buckets(self._table, settings.bucket_column, self._prompt_column)
        self._rows = {prompt_id: row for row, prompt_id in enumerate(self.ids)}

    def examples(self, ids: Sequence[PromptId]) -> list[Any]:
        """The data set's examples of these prompts, in order."""
        return [self._dataset[self._rows[prompt_id]] for prompt_id in ids]

    def digest(self) -> str | None:
        """What row numbers stand for; None where they are no prompt ids."""
        if not self.are_chosen or self._settings.prompt_id_column is not None:
            return None
        return prompts_digest(self._table, self._prompt_column)

    @property
    def _table(self) -> Any:
        """The data set's columns.

        Raises:
            ConfigError: If it is of a class that has none.
        """
        table = getattr(self._dataset, "dataframe", None)
        if table is None:
            raise ConfigError(
                f"rollwise.allocation.name={self._settings.allocation_name!r} chooses prompts by their rows, and "
                f"{type(self._dataset).__name__} has no `dataframe`; use a data set class that derives from verl's "
                "RLHFDataset, or allocation uniform"
            )
        return table
