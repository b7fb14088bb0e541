"""Who gets rollouts: the ways to spend a step's generation budget on prompts.

An allocation is a frozen dataclass of settings with a `build` method; what it builds is an `Allocator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rollwise.allocation.belief import Belief
from rollwise.allocation.dynamic_sampling import DynamicSampling
from rollwise.allocation.history_skipping import HistorySkipping
from rollwise.allocation.pilot_commit import PilotCommit
from rollwise.allocation.prompt_pool import PromptPool
from rollwise.allocation.successive_elimination import SuccessiveElimination
from rollwise.allocation.uniform import Uniform
from rollwise.ledger import Ledger
from rollwise.rollout import Allotment, Group


class Allocator(Protocol):
    """Decides, round by round within a step, which prompts get rollouts and which groups are trained on.

    It works on prompts' positions in the scheduler's `prompt_ids`.
    """

    name: str

    def ask(self, step: int, prompts: Sequence[int] | None) -> list[Allotment]:
        """Requests of the next round; empty once the step is complete. Ends after a bounded number of rounds."""

    def tell(self, step: int, groups: list[tuple[Allotment, Group]]) -> None:
        """Take the groups that answer the last requests, in their order."""

    def take(self, step: int) -> list[Group]:
        """The groups to train on; ends the step."""

    @property
    def exhausted(self) -> str | None:
        """Why no further step can have requests, or None."""

    def waiting(self) -> list[Group]:
        """Groups kept for later steps."""

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, besides the waiting groups, as JSON-able values."""

    def restore(self, state: dict[str, Any], waiting: list[Group]) -> None:
        """Go on from a saved state."""

    def metrics(self) -> dict[str, float]:
        """Figures for the trainer's log."""


class Allocation(Protocol):
    """Settings that can build an `Allocator`."""

    def build(self, pool: PromptPool, rng: np.random.Generator, ledger: Ledger) -> Allocator:
        """The allocator with these settings."""


#: Allocations by the name that configurations use.
ALLOCATIONS = {
    "uniform": Uniform,
    "belief": Belief,
    "pilot_commit": PilotCommit,
    "dynamic_sampling": DynamicSampling,
    "history_skipping": HistorySkipping,
    "successive_elimination": SuccessiveElimination,
}

__all__ = [
    "ALLOCATIONS",
    "Allocation",
    "Allocator",
    "Belief",
    "DynamicSampling",
    "HistorySkipping",
    "PilotCommit",
    "PromptPool",
    "SuccessiveElimination",
    "Uniform",
]
