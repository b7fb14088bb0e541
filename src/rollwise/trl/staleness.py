"""The staleness of each update's rows, read off the forward pass that TRL's loss makes anyway."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator

from rollwise.diagnostics import StalenessMonitor, row_entries
from rollwise.trl.config import RollwiseGRPOConfig

logger = logging.getLogger(__name__)

#: Key of a batch that holds the age of each row in steps; TRL's loss does not look at it.
AGE_KEY = "rollwise_age_steps"


class StalenessProbe:
    """Compares a micro-batch's log-probs with the stored ones and reports the difference by age.

    Args:
        args: The trainer's settings.
        accelerator: Gathers what the other processes saw.
    """

    def __init__(self, args: RollwiseGRPOConfig, accelerator: Accelerator) -> None:
        self.logps_BT: torch.Tensor | None = None  # of the last forward pass
        self._args = args
        self._accelerator = accelerator
        self._monitor = StalenessMonitor(args.replay_ess_bound)
        self._has_advised = False

    def observe(self, inputs: Mapping[str, Any]) -> None:
        """Take a micro-batch that TRL has just computed the loss of."""
        assert self.logps_BT is not None
        mask_BT = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask_BT = mask_BT * inputs["tool_mask"]
        log_ratios_BT = (self.logps_BT.detach() - inputs["old_per_token_logps"]).float()
        clipped_BT = self._clipped(log_ratios_BT, mask_BT, inputs["advantages"][:, None])
        local = row_entries(*(x.cpu().numpy() for x in (inputs[AGE_KEY], log_ratios_BT, mask_BT, clipped_BT)))
        entries = self._accelerator.gather(torch.from_numpy(local).to(log_ratios_BT.device, torch.float32))
        self._monitor.add(entries.cpu().numpy())

    def _clipped(self, log_ratios_BT: torch.Tensor, mask_BT: torch.Tensor, advantages_B1: torch.Tensor) -> torch.Tensor:
        args = self._args
        if args.importance_sampling_level == "sequence":
            log_ratios_B1 = (log_ratios_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
            log_ratios_BT = log_ratios_B1.expand_as(log_ratios_BT)
        ratios_BT = log_ratios_BT.exp()
        epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        if args.loss_type == "cispo":  # its bound is on the ratio itself
            return (ratios_BT > epsilon_high) & (advantages_B1 > 0)
        if args.loss_type == "sapo":  # cuts nothing off
            return torch.zeros_like(ratios_BT, dtype=torch.bool)
        too_high = (ratios_BT > 1 + epsilon_high) & (advantages_B1 > 0)
        too_low = (ratios_BT < 1 - args.epsilon) & (advantages_B1 < 0)
        return too_high | too_low

    def take_figures(self) -> dict[str, float]:
        """The figures since the last call; warns once if replayed rows have gone stale."""
        figures = self._monitor.figures()
        advice = self._monitor.advice()
        if advice is not None and not self._has_advised:
            logger.warning("%s.", advice[0].upper() + advice[1:])
            self._has_advised = True
        self._monitor.clear()
        return figures
