"""Where verl takes a step's rows from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transfer_queue import KVBatchMeta

from rollwise.verl.queue import GENERATED


class StepSampler:
    """Stands where verl has its `ReplayBuffer`, which is a queue of what has been generated and not trained on yet.

    Args:
        stock: verl's own; it still serves validation.
        sample: Gives a training step its rows.
    """

    def __init__(self, stock: Any, sample: Callable[[int, int], tuple[KVBatchMeta, dict[str, float]]]) -> None:
        self.stock = stock
        self._sample = sample

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """As verl's."""
        if partition_id != GENERATED:
            return self.stock.sample(global_steps, partition_id, batch_size)
        return self._sample(global_steps, batch_size)

    def wait_for(self, uids: Sequence[str], poll_seconds: float) -> list[str]:
        """Wait until all sessions of these prompts have ended; the keys of their rows."""
        self.stock.poll_interval = poll_seconds
        last_told = 0.0
        while True:
            self.stock._sync_metadata_from_transfer_queue()
            done = self.stock.finished_keys[GENERATED] | self.stock.failure_keys[GENERATED]
            if done.issuperset(uids):
                rows = dict(self.stock.partitions[GENERATED])
                return list(self.stock._materialize_batch(GENERATED, list(uids), rows).keys)
            last_told = self.stock._wait_for_next_poll(GENERATED, last_told)
