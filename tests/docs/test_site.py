"""The documentation builds strictly, and what it says about the code is in the code."""

import ast
import importlib
import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields

import pytest
from snippets import ROOT

griffe = pytest.importorskip("griffe")
sys.path.insert(0, str(ROOT / "docs"))
import _hooks  # noqa: E402


def build(folder, *, config=ROOT / "mkdocs.yml"):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", config, "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_site_builds_strictly_and_needs_no_network(tmp_path):
    result = build(tmp_path / "site")
    assert result.returncode == 0, result.stderr + result.stdout
    pages = {path.parent.name or "index" for path in (tmp_path / "site").rglob("index.html")}
    assert {"replay", "allocation", "settings", "papers", "troubleshooting", "api"} <= pages
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert not loaded, f"{page} loads {loaded}"
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in _hooks.public_names():
        assert f'id="{_hooks._shown(name)}"' in api, name


@pytest.mark.parametrize("name", _hooks.public_names())
def test_every_public_name_is_documented(name):
    assert _hooks.is_documented(name)


@pytest.mark.parametrize("name", re.findall(r"^::: ([\w.]+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
def test_what_the_api_page_names_exists(name):
    assert _hooks.is_documented(name)


def test_public_names_are_those_that_can_be_imported():
    names = _hooks.public_names()
    assert "rollwise.RolloutScheduler" in names
    assert "rollwise.trl.RollwiseGRPOTrainer" in names
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not module.startswith("rollwise.verl"):  # an environment of its own
            assert hasattr(importlib.import_module(module), attribute)


def settings_pages():
    return re.findall(r"\{\{ settings ([\w.]+) \}\}", (ROOT / "docs" / "settings.md").read_text())


@pytest.mark.parametrize("dotted", settings_pages())
def test_settings_are_listed_as_the_code_has_them(dotted):
    """Read from the source by the page, compared with the class itself."""
    from trl import GRPOConfig

    module, _, name = dotted.rpartition(".")
    known = getattr(importlib.import_module(module), name)
    own = {field.name: field for field in fields(known)}
    if issubclass(known, GRPOConfig):
        own = {name: field for name, field in own.items() if name not in GRPOConfig.__dataclass_fields__}
    listed = {name: default for name, default, unit, meaning in _hooks.settings_of(dotted)}
    assert set(listed) == set(own)
    for name, default in listed.items():
        value = own[name].default if own[name].default is not MISSING else own[name].default_factory()
        assert eval(default, {}) == value, name  # noqa: S307 - from this repository's own source


def test_every_allocation_has_its_settings_listed():
    from rollwise.allocation import ALLOCATIONS

    assert {f"rollwise.{cls.__name__}" for cls in ALLOCATIONS.values()} <= set(settings_pages())


def test_a_setting_without_documentation_is_refused(monkeypatch):
    source = '"""A."""\nfrom dataclasses import dataclass\n@dataclass\nclass Own:\n    """B."""\n    bare: int = 1\n'
    with griffe.temporary_visited_module(source, module_name="rollwise") as module:
        monkeypatch.setattr(_hooks, "package", lambda: module)
        with pytest.raises(_hooks.PluginError, match=r"rollwise\.Own\.bare has no documentation"):
            _hooks.settings_of("rollwise.Own")


def strings_of_the_code():
    """All string constants, those of f-strings with their gaps left open."""
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    return "\n".join(texts)


def messages_quoted():
    """What the first columns of the troubleshooting page quote that is a sentence, not a name."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell) if text.count(" ") >= 2]


@pytest.fixture(scope="module")
def code():
    return strings_of_the_code()


@pytest.mark.parametrize("message", messages_quoted())
def test_messages_quoted_under_troubleshooting_exist(message, code):
    assert message in code


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_every_page_is_in_the_navigation(page):
    assert f": {page.relative_to(ROOT / 'docs')}\n" in (ROOT / "mkdocs.yml").read_text()


def test_public_names_and_signatures_are_pinned():
    import public_api

    assert public_api.describe() == public_api.PINNED.read_text(encoding="utf-8"), (
        "the public names or signatures have changed; if that is meant, run: python tests/docs/public_api.py"
    )
