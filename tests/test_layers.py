"""Who may import whom: the core nobody else's, adapters no command, commands nothing but the command line."""

import ast
from pathlib import Path

import pytest

import rollwise

SOURCE = Path(rollwise.__file__).parent

#: Each part and the parts that it may import, besides the modules of the core and itself.
MAY_IMPORT = {
    "allocation": set(),
    "replay": set(),
    "evaluation": {"tasks"},  # the arithmetic task is a benchmark, as benchmarks are tasks
    "simulation": {"allocation", "evaluation", "records", "study"},
    "tasks": {"evaluation"},
    "trl": {"allocation", "replay", "tasks"},
    "verl": {"allocation", "replay"},
    "records": {"evaluation", "replay"},
    "study": {"evaluation", "records"},
    "report": {"evaluation", "records", "study"},
}


def imports(path):
    """Names of all modules of this package that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = node.module == "rollwise"
            yield from (f"rollwise.{alias.name}" if whole else node.module for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def parts_that(folder_or_file):
    files = folder_or_file.rglob("*.py") if folder_or_file.is_dir() else [folder_or_file]
    found = {name.split(".")[1] for path in files for name in imports(path) if name.startswith("rollwise.")}
    return {part for part in found if (SOURCE / part).is_dir()}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_lies_below_it(part):
    assert parts_that(SOURCE / part) <= MAY_IMPORT[part] | {part}


def test_every_part_has_its_place():
    parts = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert parts == {*MAY_IMPORT, "commands"}


def test_the_core_uses_allocation_and_replay_alone():
    core = [path for path in SOURCE.glob("*.py") if path.name != "cli.py"]
    assert set().union(*map(parts_that, core)) == {"allocation", "replay"}
