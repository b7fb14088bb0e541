"""What is used again while it is still fresh."""

from rollwise.replay.buffer import ReplayBuffer
from rollwise.replay.freshness import Clock
from rollwise.replay.settings import Replay

__all__ = ["Clock", "Replay", "ReplayBuffer"]
