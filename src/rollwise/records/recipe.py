"""A recipe: a YAML file of flat TRL and Rollwise fields, read before anything heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rollwise.usage import UsageError, one_line


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe's fields; its `env:` section, if any, goes into the environment as in TRL's recipes.

    Raises:
        UsageError: The file is missing, is not YAML, or is not a mapping of fields to values.
    """
    fields = read_yaml(path)
    os.environ.update(pop_env(fields, str(path)))
    return fields


def read_yaml(path: Path, kind: str = "recipe") -> dict[str, Any]:
    """Read a YAML file of fields; nothing else is done with them.

    Args:
        path: The file.
        kind: What it is called in a message.

    Raises:
        UsageError: The file is missing, is not YAML, or is not a mapping of fields to values.
    """
    import yaml  # type: ignore[import-untyped, unused-ignore]

    if not path.is_file():
        here = sorted(str(p) for p in path.parent.glob("[!.]*.y*ml")) if path.parent.is_dir() else []
        found = f"there are {', '.join(here[:8])}" if here else "give the path of a .yaml file of fields"
        raise UsageError(f"no {kind} file {str(path)!r}; {found}")
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {one_line(error)}") from None
    fields = {} if fields is None else fields
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise UsageError(f"{path} must hold one 'field: value' per line, as in TRL's recipes")
    return fields


def pop_env(fields: dict[str, Any], source: str) -> dict[str, str]:
    """Take the `env:` section, if any, out of a recipe's fields.

    Raises:
        UsageError: It is not a mapping; the message begins with `source`.
    """
    variables = fields.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise UsageError(f"{source}: env must map names of environment variables to values, not {variables!r}")
    return {str(name): str(value) for name, value in variables.items()}
