"""Rollwise: GRPO training that spends fewer rollouts.

Allocation decides which prompts get rollouts, replay decides which rollouts are used again while they are still
fresh. The core here needs numpy alone; `rollwise.trl` brings it into Hugging Face TRL.
"""

from rollwise._version import __version__
from rollwise.allocation import (
    Belief,
    DynamicSampling,
    HistorySkipping,
    PilotCommit,
    SuccessiveElimination,
    Uniform,
)
from rollwise.errors import (
    ConfigError,
    InexactSettingError,
    ProtocolError,
    RewardError,
    RolloutError,
    RollwiseError,
    StateError,
    VersionError,
)
from rollwise.ledger import Ledger
from rollwise.replay import Replay, ReplayBuffer
from rollwise.rollout import Batch, Request, Rollout, Row
from rollwise.scheduler import RolloutScheduler

__all__ = [
    "Batch",
    "Belief",
    "ConfigError",
    "DynamicSampling",
    "HistorySkipping",
    "InexactSettingError",
    "Ledger",
    "PilotCommit",
    "ProtocolError",
    "Replay",
    "ReplayBuffer",
    "Request",
    "RewardError",
    "Rollout",
    "RolloutError",
    "RolloutScheduler",
    "RollwiseError",
    "Row",
    "StateError",
    "SuccessiveElimination",
    "Uniform",
    "VersionError",
    "__version__",
]
