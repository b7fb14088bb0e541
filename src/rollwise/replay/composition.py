"""What a batch is made of: fresh rollouts, and what is drawn from the buffer.

Source: fresh-anchored and pool, "Rollout-Level Advantage-Prioritized Experience Replay for GRPO", arXiv 2606.04560;
replay-only updates, "Freshness-Aware Prioritized Experience Replay", arXiv 2604.16918.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollwise.replay.buffer import ReplayBuffer
from rollwise.replay.freshness import Clock
from rollwise.rollout import Rollout


@dataclass(frozen=True)
class Composition:
    """The rollouts of one batch.

    Attributes:
        fresh: Those whose groups were completed in this step, as far as they are in the batch.
        replayed: Those drawn from what was stored before.
        weights: Importance weights of fresh and replayed ones, in this order.
    """

    fresh: Sequence[Rollout]
    replayed: Sequence[Rollout] = ()
    weights: Sequence[float] = field(default=())

    def __post_init__(self) -> None:
        if not self.weights:
            object.__setattr__(self, "weights", [1.0] * (len(self.fresh) + len(self.replayed)))


def num_units(buffer: ReplayBuffer, rollouts: Sequence[Rollout]) -> int:
    """How many units these fresh rollouts are: rollouts or groups."""
    if buffer.settings.unit == "rollout":
        return len(rollouts)
    return len({rollout.prompt_id for rollout in rollouts})


def compose(buffer: ReplayBuffer, fresh: Sequence[Rollout], now: Clock, rng: np.random.Generator) -> Composition:
    """The batch of a step that generated; its fresh rollouts enter the buffer.

    "fresh_anchored": all B' fresh units and a draw of round(ratio * B'). "pool": round((1 + ratio) * B') drawn from
    stored and fresh units together.
    """
    settings = buffer.settings
    fresh_units = num_units(buffer, fresh)
    is_warm = now.step >= settings.warmup_steps
    if settings.composition == "pool" and is_warm:
        buffer.insert(fresh)
        wanted = math.floor((1 + settings.ratio) * fresh_units + 0.5)
        drawn = list(zip(*buffer.draw_weighted(wanted, now, rng), strict=True))
        new = {id(rollout) for rollout in fresh}
        drawn.sort(key=lambda pair: id(pair[0]) not in new)  # stable: fresh ones first
        kept = [rollout for rollout, _ in drawn if id(rollout) in new]
        return Composition(kept, [r for r, _ in drawn[len(kept) :]], [weight for _, weight in drawn])
    wanted = math.floor(settings.ratio * fresh_units + 0.5) if is_warm else 0
    replayed, weights = buffer.draw_weighted(wanted, now, rng)
    buffer.insert(fresh)
    return Composition(fresh, replayed, [1.0] * len(fresh) + weights)


def replay_only(buffer: ReplayBuffer, wanted_units: int, now: Clock, rng: np.random.Generator) -> Composition:
    """The batch of a step that generates nothing."""
    replayed, weights = buffer.draw_weighted(wanted_units, now, rng)
    return Composition((), replayed, weights)
