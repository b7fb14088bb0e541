"""What is used again while it is still fresh."""

from rollwise.replay.buffer import Replay, ReplayBuffer

__all__ = ["Replay", "ReplayBuffer"]
