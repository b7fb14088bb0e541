"""Advantages and TD errors of the rows that are trained on, where verl's stages keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollwise.advantage import td_errors
from rollwise.rollout import Batch, Row
from rollwise.verl import queue
from rollwise.verl.checks import ROW_MEANS
from rollwise.verl.queue import TRAINED
from rollwise.verl.rows import Place


class Placed(NamedTuple):
    """A row of the scheduler's, where it stands, and the keys of verl's rows that it consists of."""

    row: Row
    place: Place
    keys: list[str]


def freeze(placed: Sequence[Placed], keys: Sequence[str], batch: Batch, loss_agg_mode: str) -> None:
    """Replace verl's advantages, relative to whoever is in the batch, by those frozen with the whole group.

    verl's losses are linear in the advantage, so what their normaliser has too much or too little goes in there.

    Args:
        placed: The batch's rows.
        keys: Theirs and those of verl's padding rows, which get 0.
        batch: The batch, for its normaliser.
        loss_agg_mode: verl's, for what its normaliser is.
    """
    scale = _loss_scale(placed, len(keys), batch, loss_agg_mode)
    values = {key: row.advantage * row.weight * scale for row, _, mine in placed for key in mine}
    masks = queue.get(keys, TRAINED, ("response_mask",))
    rows = [values.get(key, 0.0) * row["response_mask"].float() for key, row in zip(keys, masks, strict=True)]
    queue.put(keys, [{"advantages": row, "returns": row} for row in rows])


def _loss_scale(placed: Sequence[Placed], num_rows: int, batch: Batch, loss_agg_mode: str) -> float:
    """What verl's loss divides by, over what the scheduler wants it to divide by."""
    if loss_agg_mode in ROW_MEANS:
        real_rows = sum(len(keys) for _, _, keys in placed)
        return num_rows * len(batch.rows) / (real_rows * batch.normalizer_rows)
    return sum(row.rollout.loss_tokens for row in batch.rows) / batch.normalizer_tokens


def weigh(placed: Sequence[Placed]) -> None:
    """Multiply a critic's advantages by the importance weights of the draw, where there are any."""
    weighted = [(keys, row.weight) for row, _, keys in placed if row.weight != 1.0]
    keys = [key for keys, _ in weighted for key in keys]
    if not keys:
        return
    weights = [weight for keys, weight in weighted for _ in keys]
    rows = queue.get(keys, TRAINED, ("advantages",))
    queue.put(keys, [{"advantages": row["advantages"] * w} for row, w in zip(rows, weights, strict=True)])


def mean_td_errors(placed: Sequence[Placed], gamma: float) -> list[float]:
    """Mean |TD error| over the loss tokens of each rollout placed; see `rollwise.advantage.td_errors`."""
    keys = [key for _, _, mine in placed for key in mine]
    rows = iter(queue.get(keys, TRAINED, ("rm_scores", "values", "response_mask")))
    means = []
    for _, _, mine in placed:
        total, num_tokens = 0.0, 0
        for _ in mine:
            row = next(rows)
            mask_T = row["response_mask"].bool()
            errors_T = td_errors(row["rm_scores"][mask_T], row["values"][mask_T], gamma)
            total, num_tokens = total + float(abs(errors_T).sum()), num_tokens + len(errors_T)
        means.append(total / max(num_tokens, 1))
    return means
