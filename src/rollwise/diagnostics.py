"""How stale replayed rows are: divergence of the policy from the one that generated them, by age.

With w = pi / mu per token, mu the behaviour policy whose log-probs were stored with the rollout, over the tokens of
all rows of one age:

    ess_token     (sum w)^2 / (n sum w^2), the share of tokens that count; at most exp(-KL) in expectation
    ess_sequence  the same over rows, with w the product of a row's token ratios
    kl            mean of w - 1 - log w, an unbiased estimate of KL(mu || pi) per token that is never negative
    clip_fraction share of tokens whose ratio the clip has cut off

Source: ESS and its bound, "Freshness-Aware Prioritized Experience Replay", arXiv 2604.16918; the estimator,
J. Schulman, "Approximating KL Divergence", 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollwise.errors import ConfigError
from rollwise.rollout import Batch

#: Lower ends of the age bins, in steps: 0, 1, 2-3, 4-7, 8-15, 16-31, 32 and more.
AGE_BIN_STARTS = (0, 1, 2, 4, 8, 16, 32)
_AGE_BIN_NAMES = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32+")


def effective_sample_size(log_weights: ArrayLike) -> float:
    """`(sum w)^2 / (n sum w^2)` of weights given as logarithms, in (0, 1]; NaN without any.

    Computed in log space: no weight overflows.
    """
    log_weights = np.asarray(log_weights, dtype=np.float64)
    if len(log_weights) == 0:
        return float("nan")
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def row_entries(
    ages_B: ArrayLike, log_ratios_BT: ArrayLike, mask_BT: ArrayLike, clipped_BT: ArrayLike
) -> NDArray[np.float64]:
    """What is kept of each row: sums over its tokens, small enough to be gathered from every process.

    Args:
        ages_B: Age of each row in steps, shape (B,).
        log_ratios_BT: log pi - log mu per token, shape (B, T).
        mask_BT: Which tokens carry loss, shape (B, T).
        clipped_BT: Which ratios the clip has cut off, shape (B, T).

    Returns:
        Shape (B, 7): age, tokens, and the sums of log w, w, w^2, w - 1 - log w and the clipped tokens.
    """
    mask_BT = np.asarray(mask_BT, dtype=bool)
    log_ratios_BT = np.where(mask_BT, np.asarray(log_ratios_BT, dtype=np.float64), 0.0)
    ratios_BT = np.where(mask_BT, np.exp(np.clip(log_ratios_BT, -50.0, 50.0)), 0.0)
    columns = [
        np.asarray(ages_B, dtype=np.float64),
        mask_BT.sum(1),
        log_ratios_BT.sum(1),
        ratios_BT.sum(1),
        (ratios_BT**2).sum(1),
        np.where(mask_BT, ratios_BT - 1.0 - log_ratios_BT, 0.0).sum(1),
        (np.asarray(clipped_BT, dtype=bool) & mask_BT).sum(1),
    ]
    return np.stack(columns, axis=1)


def as_entries(entries_B: ArrayLike) -> NDArray[np.float64]:
    """Rows as `row_entries` describes them, without those that have no loss tokens."""
    entries_B = np.asarray(entries_B, dtype=np.float64).reshape(-1, 7)
    return entries_B[entries_B[:, 1] > 0]


def batch_figures(batch: Batch, success_threshold: float = 1.0) -> dict[str, float]:
    """What a batch is made of: its rows, and the ages, rewards and uses of the replayed ones.

    `replayed_positive_share` and `replayed_correct_share`: which were better than their group's mean, and which
    succeeded. `replayed_uses_...`: how many batches a replayed rollout has been in, this one included. Figures
    without a value, such as the ages of no rows, are left out.
    """
    replayed = [row for row in batch.rows if row.source == "replay"]
    figures = {
        "step_rows_fresh": float(len(batch.rows) - len(replayed)),
        "step_rows_replayed": float(len(replayed)),
    }
    if not math.isnan(batch.success_rate):
        figures["success_rate"] = batch.success_rate
    if replayed:
        ages = [row.age_steps for row in replayed]
        uses = [row.rollout.num_uses for row in replayed]
        figures |= {
            "age_mean": sum(ages) / len(ages),
            "age_max": float(max(ages)),
            "replayed_positive_share": sum(row.advantage > 0 for row in replayed) / len(replayed),
            "replayed_correct_share": sum(row.rollout.reward >= success_threshold for row in replayed) / len(replayed),
            "replayed_uses_mean": sum(uses) / len(uses),
            "replayed_uses_max": float(max(uses)),
        }
        if any(row.weight != 1.0 for row in replayed):
            figures["per_weight_mean"] = sum(row.weight for row in replayed) / len(replayed)
    return figures


@dataclass(slots=True)
class StalenessMonitor:
    """Collects one entry per row and update, and sums them up by age.

    Attributes:
        ess_bound: `advice()` speaks up when the token-level ESS of some age falls below this.
    """

    ess_bound: float = 0.5
    _entries: list[NDArray[np.float64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 <= self.ess_bound <= 1:
            raise ConfigError(f"ess_bound is {self.ess_bound}; it must be between 0 and 1")

    def add(self, entries_B: ArrayLike) -> None:
        """Take what `row_entries` made of the rows of one update; rows without loss tokens are left out."""
        self._entries.append(as_entries(entries_B))

    def figures(self) -> dict[str, float]:
        """`ess_token/age_<bin>`, `ess_sequence/...`, `kl/...`, `clip_fraction/...` and quantiles of the ratio.

        The ratio of a row is the geometric mean over its tokens; `ratio_q05`, `ratio_q50` and `ratio_q95` are quantiles
        over the rows of an age bin. Bins without rows are left out.
        """
        figures: dict[str, float] = {}
        for name, entries in self._bins():
            _, tokens, log_ratio, _, _, divergence, clipped = entries.T
            figures[f"ess_token/age_{name}"] = _token_ess(entries)
            figures[f"ess_sequence/age_{name}"] = effective_sample_size(log_ratio)
            figures[f"kl/age_{name}"] = float(divergence.sum() / tokens.sum())
            figures[f"clip_fraction/age_{name}"] = float(clipped.sum() / tokens.sum())
            quantiles = np.quantile(np.exp(log_ratio / tokens), (0.05, 0.5, 0.95))
            for percent, value in zip(("05", "50", "95"), quantiles, strict=True):
                figures[f"ratio_q{percent}/age_{name}"] = float(value)
        return figures

    def advice(self) -> str | None:
        """What to change if rows of some age no longer count; None if all is well."""
        for name, entries in self._bins():
            if name == "0":
                continue
            ess = _token_ess(entries)
            if ess < self.ess_bound:
                return (
                    f"replayed rows of age {name} steps have a token-level effective sample size of {ess:.2f} "
                    f"(bound {self.ess_bound}): the policy has moved far from the one that generated them; lower the "
                    "age bound or the decay tau of replay, or the learning rate"
                )
        return None

    def clear(self) -> None:
        """Forget what was collected."""
        self._entries.clear()

    def _bins(self) -> list[tuple[str, NDArray[np.float64]]]:
        if not self._entries:
            return []
        entries = np.concatenate(self._entries)
        bins = np.searchsorted(AGE_BIN_STARTS, entries[:, 0], side="right") - 1
        return [(name, entries[bins == i]) for i, name in enumerate(_AGE_BIN_NAMES) if (bins == i).any()]


def _token_ess(entries: NDArray[np.float64]) -> float:
    tokens, ratio, square = entries[:, 1].sum(), entries[:, 3].sum(), entries[:, 4].sum()
    return float(ratio**2 / (tokens * square))
