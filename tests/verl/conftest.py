"""Tests in `real/` run verl's whole loop and need it installed: `make test-verl` runs them, in its own environment.

The others need neither verl nor Ray.
"""

from importlib import metadata

import pytest


def _is_installed(name):
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


# By the distribution, not by an import: this folder itself can be imported as a package of that name.
_MISSING = [name for name in ("verl", "ray", "TransferQueue") if not _is_installed(name)]
collect_ignore = ["real"] if _MISSING else []


def pytest_report_header():
    if _MISSING:
        return f"tests/verl/real is left out: {', '.join(_MISSING)} not installed here (make test-verl runs it)"
    return None


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Pilot-Commit and replay, one process, the rewards of `decisions.py`, a checkpoint every two steps."""
    import decisions
    from launch import launch, make_inputs

    folder = tmp_path_factory.mktemp("whole")
    make_inputs(folder, num_prompts=decisions.NUM_PROMPTS, levels=("sort-3",))
    run = launch(
        folder,
        "whole",
        *decisions.verl_overrides(),
        "trainer.save_freq=2",
        env={"VERL_ON_CPU_REWARDS": "decisions"},
        **decisions.verl_settings(),
    )
    assert run.exit_code == 0, run.output[-5000:]
    return run


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """A folder with the model and the data of the runs."""
    from launch import make_inputs

    folder = tmp_path_factory.mktemp("verl")
    make_inputs(folder)
    return folder
