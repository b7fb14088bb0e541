"""A clear message where verl is missing or another release."""

import importlib
import sys
from importlib import metadata

import pytest

from rollwise import VersionError
from rollwise.verl import TESTED_VERL_VERSIONS, check_verl_version


@pytest.mark.parametrize("installed", [*TESTED_VERL_VERSIONS, TESTED_VERL_VERSIONS[-1] + "+cpu"])
def test_a_tested_release_is_fine(monkeypatch, installed):
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    check_verl_version()


@pytest.mark.parametrize("installed", ["0.8.0", "0.9.10", "0.10.0.dev1", "1.0"])
def test_another_release_is_refused_with_both_versions_and_the_remedy(monkeypatch, installed):
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    with pytest.raises(VersionError, match=f"tested with verl 0.9.1, found {installed}; .*pip install"):
        check_verl_version()


@pytest.mark.parametrize("module", ["rollwise.verl.main", "rollwise.verl.trainer"])
def test_the_entry_points_look_at_the_version_before_anything_of_verls(monkeypatch, module):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    for name in ("verl", "ray", "hydra", "transfer_queue", "omegaconf"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in (module, "rollwise.verl.version_check"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(VersionError, match="not installed; install a tested one"):
        importlib.import_module(module)
