"""The errors Rollwise raises: one tree, each leaf also a built-in kind, each message with its remedy."""


class RollwiseError(Exception):
    """Root of every error that Rollwise raises on purpose."""


class ConfigError(RollwiseError, ValueError):
    """A setting is out of its bounds, or two settings contradict each other."""


class InexactSettingError(ConfigError):
    """A setting under which replay or allocation would change the gradient in an undeclared way."""


class ProtocolError(RollwiseError, RuntimeError):
    """`ask`, `tell` and `batch` were called out of order."""


class RolloutError(RollwiseError, ValueError):
    """The rollouts that were told do not answer the requests that were asked."""


class RewardError(RollwiseError, RuntimeError):
    """A reward function cannot score anything: it failed for every rollout it was first given."""


class StateError(RollwiseError, ValueError):
    """A saved state is damaged, of another format, or of another run."""


class VersionError(RollwiseError, ImportError, RuntimeError):
    """An installed library is missing or outside the supported range."""
