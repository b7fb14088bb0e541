"""Rollwise inside Hugging Face TRL: `RollwiseGRPOTrainer` in place of `GRPOTrainer`.

from rollwise.trl import RollwiseGRPOConfig, RollwiseGRPOTrainer
"""

from importlib import metadata

from rollwise.errors import VersionError

#: TRL releases this adapter works with: at least the first, below the second.
TRL_VERSIONS = ((1, 0), (1, 17))


def _check_trl_version() -> None:
    (low, high) = (".".join(map(str, version)) for version in TRL_VERSIONS)
    remedy = f"install a supported one with: pip install 'trl>={low},<{high}'"
    try:
        installed = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise VersionError(f"rollwise.trl needs TRL, which is not installed; {remedy}") from None
    release = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if not TRL_VERSIONS[0] <= release < TRL_VERSIONS[1]:
        raise VersionError(f"rollwise.trl works with TRL from {low} to below {high}, found {installed}; {remedy}")


_check_trl_version()

from rollwise.trl.config import RollwiseGRPOConfig  # noqa: E402 - the version is checked first
from rollwise.trl.trainer import RollwiseGRPOTrainer  # noqa: E402

__all__ = ["TRL_VERSIONS", "RollwiseGRPOConfig", "RollwiseGRPOTrainer"]
