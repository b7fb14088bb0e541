"""What is built can be installed and used from any folder."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

from rollwise import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_BYTES = 5_000_000


def python(*words, cwd, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and a wheel made from what the sdist holds, as pip makes it."""
    folder = tmp_path_factory.mktemp("built")
    python("-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    python("-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=folder / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_the_wheel_trains_from_any_folder(built, tmp_path):
    """Installed without its dependencies, which are there already, and far from the repository."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target")
    python(*install, site, built[1], cwd=tmp_path, PIP_DISABLE_PIP_VERSION_CHECK="1")
    elsewhere.mkdir()
    (elsewhere / "recipe.yaml").write_text((ROOT / "examples" / "arithmetic_all.yaml").read_text())
    small = (
        *("--max_steps", "2", "--eval_steps", "2", "--replay_warmup_steps", "0"),
        *("--per_device_train_batch_size", "64", "--num_generations", "8", "--num_generations_eval", "2"),
        *("--per_device_eval_batch_size", "32", "--arithmetic_test_problems", "16"),
    )
    text = python("-m", "rollwise.cli", "train", "recipe.yaml", *small, cwd=elsewhere, PYTHONPATH=str(site))
    assert "step 2/2" in text
    summary = json.loads((elsewhere / "runs" / "recipe" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["rollouts_generated"] > 0
    where = "import rollwise, importlib.metadata as m; print(rollwise.__file__, m.version('rollwise'))"
    path, version = python("-c", where, cwd=elsewhere, PYTHONPATH=str(site)).split()
    assert path.startswith(str(site))
    assert version == __version__


@pytest.mark.slow
def test_what_the_archives_hold(built):
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: info.file_size for info in archive.infolist()}
        (metadata,) = [name for name in files if name.endswith("METADATA")]
        headers = Parser().parsestr(archive.read(metadata).decode())
    for name in ("py.typed", "tasks/assets/arithmetic/model.safetensors", "report/page.html.j2", "report/page.css"):
        assert f"rollwise/{name}" in files
    assert not [name for name in files if not name.startswith(("rollwise/", f"rollwise-{__version__}.dist-info/"))]
    assert {"LICENSE", "NOTICE"} <= {name.rpartition("/")[2] for name in files}
    assert max(files.values()) <= MOST_BYTES
    assert headers["Version"] == __version__
    assert set(headers.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "mkdocs.yml", "noxfile.py", "Makefile"} <= names
    assert {"examples/bare_loop.py", "docs/index.md", "tests/conftest.py", "constraints.txt"} <= names
    assert not [name for name in names if name.startswith(("runs", "site", ".venv"))]


def test_no_file_is_large():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        assert not (ROOT / name).is_file() or (ROOT / name).stat().st_size <= MOST_BYTES, f"{name} is over 5 MB"


def test_the_version_is_the_same_everywhere():
    assert re.search(rf"^## \[{re.escape(__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert citation["title"].startswith("Rollwise")


def test_every_supported_python_and_trl_is_tested_by_a_workflow():
    supported = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)}
    assert PROJECT["requires-python"] == f">={min(supported)}"
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]
    assert set(ci["strategy"]["matrix"]["python"]) == supported
    assert any("bash .ci/run" in step.get("run", "") for step in ci["steps"])
    weekly = yaml.safe_load((ROOT / ".github" / "workflows" / "trl.yml").read_text())
    assert weekly[True]["schedule"]  # YAML reads the key `on` as true
    range_line = re.search(r"sed -i 's/\^(\w+ =)", str(weekly["jobs"]["newest"]["steps"]))[1]
    assert re.search(rf"^{range_line}", (ROOT / "src" / "rollwise" / "trl" / "__init__.py").read_text(), re.MULTILINE)
    releases = re.findall(r"trl==([\d.]+)", (ROOT / "noxfile.py").read_text())
    assert f"{releases[0]}" == "1.0.0", "the oldest that is supported"
    assert f"trl=={releases[-1]}" in (ROOT / "constraints.txt").read_text()
