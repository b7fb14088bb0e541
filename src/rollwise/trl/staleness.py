"""The staleness of each update's rows, read off the forward pass that TRL's loss makes anyway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from rollwise.diagnostics import StalenessMonitor, row_entries
from rollwise.trl.config import RollwiseGRPOConfig
from rollwise.trl.corrections import REPLAYED_KEY, cut_off, loss_mask, loss_ratios

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
        self._unread: list[NDArray[np.float64]] = []  # entries since the last `take_entries`

    def observe(self, inputs: Mapping[str, Any]) -> None:
        """Take a micro-batch that TRL has just computed the loss of."""
        assert self.logps_BT is not None
        mask_BT = loss_mask(inputs)
        log_ratios_BT = (self.logps_BT.detach() - inputs["old_per_token_logps"]).float()
        clipped_BT = self._clipped(log_ratios_BT, mask_BT, inputs["advantages"][:, None])
        cut_BT = cut_off(log_ratios_BT, mask_BT, clipped_BT, self._args)
        clipped_BT = torch.where(inputs[REPLAYED_KEY][:, None], cut_BT, clipped_BT)
        local = row_entries(*(x.cpu().numpy() for x in (inputs[AGE_KEY], log_ratios_BT, mask_BT, clipped_BT)))
        entries = self._accelerator.gather(torch.from_numpy(local).to(log_ratios_BT.device, torch.float32))
        self._unread.append(entries.cpu().numpy())
        self._monitor.add(self._unread[-1])

    def take_entries(self) -> NDArray[np.float64]:
        """Rows of all processes since the last call, for the scheduler's `feedback`."""
        entries, self._unread = self._unread, []
        return np.concatenate(entries) if entries else np.zeros((0, 7))

    def _clipped(self, log_ratios_BT: torch.Tensor, mask_BT: torch.Tensor, advantages_B1: torch.Tensor) -> torch.Tensor:
        args = self._args
        ratios_BT = loss_ratios(log_ratios_BT, mask_BT, args)
        epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        if args.loss_type == "cispo":  # its bound is on the ratio itself
            return (ratios_BT > epsilon_high) & (advantages_B1 > 0)
        if args.loss_type == "sapo":  # cuts nothing off
            return torch.zeros_like(ratios_BT, dtype=torch.bool)
        too_high = (ratios_BT > 1 + epsilon_high) & (advantages_B1 > 0)
        too_low = (ratios_BT < 1 - args.epsilon) & (advantages_B1 < 0)
        return too_high | too_low

    def advice(self) -> str | None:
        """What to change if replayed rows have gone stale since the last `take_figures`."""
        return self._monitor.advice()

    def take_figures(self) -> dict[str, float]:
        """The figures since the last call."""
        figures = self._monitor.figures()
        self._monitor.clear()
        return figures
