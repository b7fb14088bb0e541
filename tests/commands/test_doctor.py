import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollwise.commands import doctor as module
from rollwise.commands.app import app
from rollwise.commands.doctor import Component

WELL = Component("numpy", "the core", "", "import numpy", True)
ABSENT = Component("no-such-package", "nothing", None, "import no_such_package")
BROKEN = Component("packaging", "versions", None, "raise OSError('no libcudart.so.13')")
DEVICE = 'print(\'{"cpu_threads": 2, "gpus": [], "bf16": false, "mps": false}\')'


@pytest.fixture
def examine(monkeypatch):
    """Run the command over these components; gives the exit code and what was printed."""
    monkeypatch.setattr(module, "_DEVICE", DEVICE)

    def run(*components, words=("--json",)):
        monkeypatch.setattr(module, "COMPONENTS", components)
        result = CliRunner().invoke(app, ["doctor", *words])
        return result.exit_code, json.loads(result.stdout) if words else result.stdout

    return run


def statuses(content):
    return {found["package"]: found["status"] for found in content["components"]}


def test_what_is_optional_and_missing_or_broken_does_no_harm(examine):
    code, content = examine(WELL, ABSENT, BROKEN)
    assert code == 0
    assert content["ok"] is True
    assert statuses(content) == {"numpy": "works", "no-such-package": "missing", "packaging": "fails"}
    remedies = {found["package"]: found["remedy"] for found in content["components"]}
    assert remedies["numpy"] == ""
    assert remedies["no-such-package"] == "pip install no-such-package"
    assert remedies["packaging"].startswith("OSError: no libcudart.so.13")
    assert content["device"] == {"cpu_threads": 2, "gpus": [], "bf16": False, "mps": False}


@pytest.mark.parametrize(
    ("component", "status"),
    [
        (Component("no-such-package", "training", "trl", "", True), "missing"),
        (Component("numpy", "training", "trl", "import numpy.no_such_module", True), "fails"),
    ],
)
def test_without_what_training_needs_the_exit_code_is_1(component, status, examine):
    code, content = examine(component)
    assert code == 1
    assert content["ok"] is False
    assert statuses(content)[component.package] == status


def test_a_version_out_of_range_is_told_with_the_range(examine, monkeypatch):
    monkeypatch.setattr(module, "supported_versions", lambda extra: {"numpy": ">=1.26,<1.27"})
    code, content = examine(WELL)
    assert code == 1
    assert content["components"][0]["status"] == "unsupported"
    assert "is not within >=1.26,<1.27: pip install 'numpy>=1.26,<1.27'" in content["components"][0]["remedy"]


def test_a_probe_that_hangs_has_failed(examine, monkeypatch):
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.2)
    code, content = examine(Component("numpy", "", None, "import time; time.sleep(60)", True))
    assert code == 1
    assert "not done within 0.2 s" in content["components"][0]["remedy"]


def test_people_get_tables_and_remedies(examine):
    code, text = examine(WELL, ABSENT, words=())
    assert code == 0
    assert "device: CPU, 2 threads" in text
    assert "no-such-package: pip install no-such-package" in text
    assert text.rstrip().endswith("rollwise train works here")
    code, text = examine(Component("no-such-package", "training", "trl", "", True), words=())
    assert code == 1
    assert "rollwise train does not work here" in text


def test_ranges_are_those_of_the_extra(monkeypatch):
    lines = [
        "numpy>=1.26",
        "transformers>=5.8,<5.11; extra == 'verl'",
        "transformers>=4.56.2,!=5.0.*; extra == 'trl'",
        "math_verify<0.10,>=0.9; extra == 'eval'",
        "pytest; extra == 'dev'",
    ]
    monkeypatch.setattr(module.metadata, "requires", lambda name: lines)
    assert module.supported_versions("") == {"numpy": ">=1.26"}
    assert module.supported_versions("trl")["transformers"] == "!=5.0.*,>=4.56.2"
    assert module.supported_versions("verl")["transformers"] == "<5.11,>=5.8"
    assert module.supported_versions("eval")["math-verify"] == "<0.10,>=0.9"
    assert module.supported_versions("dev")["pytest"] == ""


def test_extras_that_are_named_exist():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for component in module.COMPONENTS:
        if component.extra:
            text = " ".join(project["optional-dependencies"][component.extra]).lower()
            assert component.package in text, component


@pytest.mark.slow
def test_here_training_works(monkeypatch):
    """Real components; importing TRL imports torch, transformers, accelerate and datasets too."""
    known = {component.package: component for component in module.COMPONENTS}
    monkeypatch.setattr(module, "COMPONENTS", [known["trl"], known["math-verify"]])
    result = CliRunner().invoke(app, ["doctor", "--json"])
    content = json.loads(result.stdout)
    assert result.exit_code == 0, content
    assert statuses(content) == {"trl": "works", "math-verify": "works"}
    assert content["device"]["cpu_threads"] >= 1
