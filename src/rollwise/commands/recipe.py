"""A recipe: a YAML file of flat TRL and Rollwise fields, read before anything heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rollwise.commands.errors import UsageError, one_line


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe's fields; its `env:` section, if any, goes into the environment as in TRL's recipes.

    Raises:
        UsageError: The file is missing, is not YAML, or is not a mapping of fields to values.
    """
    import yaml  # type: ignore[import-untyped, unused-ignore]

    if not path.is_file():
        here = sorted(str(p) for p in path.parent.glob("[!.]*.y*ml")) if path.parent.is_dir() else []
        found = f"there are {', '.join(here[:8])}" if here else "give the path of a .yaml file of fields"
        raise UsageError(f"no recipe file {str(path)!r}; {found}")
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {one_line(error)}") from None
    fields = {} if fields is None else fields
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise UsageError(f"{path} must hold one 'field: value' per line, as in TRL's recipes")
    variables = fields.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise UsageError(f"{path}: env must map names of environment variables to values, not {variables!r}")
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    return fields
