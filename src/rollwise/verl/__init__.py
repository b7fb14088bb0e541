"""Rollwise inside verl (Ray, FSDP, vLLM): `rollwise.verl.main` in place of `verl.trainer.main_ppo`.

    python -m rollwise.verl.main rollwise.replay.ratio=0.5 ...

`rollwise.verl.settings`, `rollwise.verl.checks` and `rollwise.verl.rows` import without verl and Ray.
"""

from importlib import metadata

from rollwise.errors import VersionError

#: verl releases that this adapter has been tried with, as docs/scaling.md says: no others, not even those in between.
TESTED_VERL_VERSIONS = ("0.9.1",)

__all__ = ["TESTED_VERL_VERSIONS", "check_verl_version"]


def check_verl_version() -> None:
    """Refuse a verl that this adapter has not been tested with: its hooks and options move between releases.

    Raises:
        VersionError: If verl is missing or another release.
    """
    known = ", ".join(TESTED_VERL_VERSIONS)
    remedy = f"install a tested one with: pip install 'rollwise[verl]' 'verl=={TESTED_VERL_VERSIONS[-1]}'"
    try:
        installed = metadata.version("verl")
    except metadata.PackageNotFoundError as error:
        raise VersionError(f"rollwise.verl needs verl, which is not installed; {remedy}") from error
    if installed.partition("+")[0] not in TESTED_VERL_VERSIONS:
        raise VersionError(f"rollwise.verl has been tested with verl {known}, found {installed}; {remedy}")
