"""How replayed rows are corrected for their staleness, where not by the clipped ratio alone.

With w = pi / mu per token (with `importance_sampling_level="sequence"`: its geometric mean over the row), mu the
behaviour policy whose log-probs were stored at generation, C the cap and b the bound, a replayed token's loss is

    clip            TRL's own loss of w, clipped
    truncated       -min(w, C) A log pi, min(w, C) as a constant
    sequence_mask   as clip; 0 in rows whose geometric mean of pi / mu is outside [1 / b, b]
    none            -A log pi

Rows that are cut off stay in the loss's normaliser. Fresh rows are left alone.

Source: truncated weights, E. L. Ionides, "Truncated Importance Sampling", 2008, and IMPALA, arXiv 1802.01561, section
4.1; the sequence ratio as a geometric mean, GSPO, arXiv 2507.18071, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rollwise.trl.config import RollwiseGRPOConfig

#: Key of a batch that says which rows are replayed; TRL's loss does not look at it.
REPLAYED_KEY = "rollwise_is_replayed"


def loss_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Which tokens of a batch carry loss, shape (B, T)."""
    mask_BT: torch.Tensor = inputs["completion_mask"]
    return mask_BT * inputs["tool_mask"] if "tool_mask" in inputs else mask_BT


def mean_log_ratio(log_ratios_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Logarithm of the geometric mean of each row's ratios, shape (B, 1)."""
    return (log_ratios_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)


def loss_ratios(log_ratios_BT: torch.Tensor, mask_BT: torch.Tensor, args: RollwiseGRPOConfig) -> torch.Tensor:
    """pi / mu at the level that the loss takes it at, per token or per row, shape (B, T)."""
    if args.importance_sampling_level == "sequence":
        log_ratios_BT = mean_log_ratio(log_ratios_BT, mask_BT).expand_as(log_ratios_BT)
    return log_ratios_BT.exp()


def correct(inputs: dict[str, Any], logps_BT: torch.Tensor, args: RollwiseGRPOConfig) -> None:
    """Rewrite a micro-batch between the model's forward pass and TRL's loss, so that the loss is the chosen one.

    Args:
        inputs: The micro-batch; its `old_per_token_logps` and `advantages` are replaced, the latter by shape (B, 1) or
            (B, T), which TRL's loss takes as well.
        logps_BT: log pi of its completions, shape (B, T).
        args: `replay_correction` and what belongs to it.
    """
    if args.replay_correction == "clip" or REPLAYED_KEY not in inputs:
        return
    is_replayed_B1 = inputs[REPLAYED_KEY][:, None]
    logps_BT, mu_BT, mask_BT = logps_BT.detach(), inputs["old_per_token_logps"], loss_mask(inputs)
    log_ratios_BT = logps_BT - mu_BT
    if args.replay_correction == "sequence_mask":
        weights = is_within(log_ratios_BT, mask_BT, args.replay_mask_bound).to(logps_BT.dtype)
    else:
        # A ratio of 1, whose gradient is that of log pi.
        inputs["old_per_token_logps"] = torch.where(is_replayed_B1, logps_BT, mu_BT)
        if args.replay_correction == "none":
            return
        weights = loss_ratios(log_ratios_BT, mask_BT, args).clamp(max=args.replay_truncation_cap)
    inputs["advantages"] = inputs["advantages"][:, None] * torch.where(
        is_replayed_B1, weights, torch.ones_like(weights)
    )


def cut_off(
    log_ratios_BT: torch.Tensor, mask_BT: torch.Tensor, clipped_BT: torch.Tensor, args: RollwiseGRPOConfig
) -> torch.Tensor:
    """Which tokens of replayed rows `correct` cuts off, shape (B, T); `clipped_BT`: those that the clip would."""
    if args.replay_correction == "sequence_mask":
        return clipped_BT | ~is_within(log_ratios_BT, mask_BT, args.replay_mask_bound)
    if args.replay_correction == "truncated":
        return loss_ratios(log_ratios_BT, mask_BT, args) > args.replay_truncation_cap
    return clipped_BT if args.replay_correction == "clip" else torch.zeros_like(clipped_BT)


def is_within(log_ratios_BT: torch.Tensor, mask_BT: torch.Tensor, bound: float) -> torch.Tensor:
    """Whether each row's geometric mean of pi / mu is within [1 / bound, bound], shape (B, 1)."""
    ratios_B1 = mean_log_ratio(log_ratios_BT, mask_BT).exp()
    return (ratios_B1 >= 1 / bound) & (ratios_B1 <= bound)
