"""What the build of the documentation does beyond Markdown.

- `{{ settings rollwise.Replay }}` becomes a table of a dataclass's fields, read from its source and docstring.
- `{{ api rest }}` becomes an entry for every public name that the page has not yet.
- Links to files of the repository outside `docs/` become their names.
- A public name or a setting without documentation fails the build.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rollwise"

#: Unit by the end of a field's name; the first that fits.
_UNITS = (
    ("_tau_kl", "nats per token"),
    ("_age_kl", "nats per token"),
    ("_steps", "training steps"),
    ("_versions", "policy versions"),
    ("_rollouts", "rollouts"),
    ("_prompts", "prompts"),
    ("_rounds", "rounds"),
    ("_uses", "batches"),
    ("_bytes", "bytes"),
    ("_seconds", "seconds"),
    ("_minutes", "minutes"),
    ("_share", "share, 0 to 1"),
    ("ratio", "rows per fresh row"),
    ("updates_per_fresh", "updates"),
    ("success_threshold", "reward"),
    ("p_lower", "success rate"),
    ("p_upper", "success rate"),
    ("p_solve", "success rate"),
)


@functools.cache
def package() -> Any:
    """The package, read without importing it: no torch, no TRL."""
    return griffe.load("rollwise", search_paths=[ROOT / "src"], docstring_parser="google")


def public_names() -> list[str]:
    """Dotted names of all that the package's `__all__`s hold, each under the shortest module that offers it."""
    named: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: (len(path.parts), str(path))):
        module = ".".join(["rollwise", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
                for name in ast.literal_eval(node.value):
                    if name != "__version__":
                        dotted = f"{module}.{name}"
                        named.setdefault(_resolve(dotted).canonical_path, dotted)
    return sorted(named.values())


def _resolve(dotted: str) -> Any:
    try:
        found = package()[dotted.removeprefix("rollwise.")]
    except KeyError:
        raise PluginError(f"there is no {dotted}") from None
    if found.is_module and found.name in found.members:  # a module and what is imported from it have one name
        found = found.members[found.name]
    return found.final_target if found.is_alias else found


def _shown(dotted: str) -> str:
    """The name as it is imported, unless a module has it too."""
    return _resolve(dotted).canonical_path if package()[dotted.removeprefix("rollwise.")].is_module else dotted


def is_documented(dotted: str) -> bool:
    """Whether there is a docstring, or for a constant a comment `#:` above it."""
    found = _resolve(dotted)
    if found.has_docstring:
        return True
    lines = found.filepath.read_text(encoding="utf-8").splitlines()
    return bool(found.is_attribute and found.lineno > 1 and lines[found.lineno - 2].startswith("#:"))


def settings_of(dotted: str) -> list[tuple[str, str, str, str]]:
    """Name, default, unit and meaning of each field of a dataclass of settings.

    The meaning is what the class's docstring says under `Attributes`, or the field's `help`.
    """
    found = _resolve(dotted)
    meanings: dict[str, str] = {}
    for section in found.docstring.parsed if found.docstring else ():
        if section.kind is griffe.DocstringSectionKind.attributes:
            meanings |= {attribute.name: attribute.description for attribute in section.value}
    rows = []
    for name, member in found.members.items():
        if not member.is_attribute or name.startswith("_") or "property" in member.labels or member.value is None:
            continue
        default, meaning = str(member.value), meanings.get(name, "")
        call = ast.parse(default, mode="eval").body
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "field":
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            if "metadata" in keywords:
                meaning = meaning or ast.literal_eval(keywords["metadata"])["help"]
            factory = keywords.get("default_factory")
            shown = keywords.get("default", factory.body if isinstance(factory, ast.Lambda) else factory)
            default = ast.unparse(shown) if shown is not None else ""
        default = _constants(found).get(default, default)
        if not meaning:
            raise PluginError(f"setting {dotted}.{name} has no documentation")
        is_text = default.startswith(("'", '"'))
        unit = next((unit for end, unit in _UNITS if name.endswith(end) and not is_text), "")
        rows.append((name, default, unit, " ".join(meaning.split())))
    if not rows:
        raise PluginError(f"{dotted} has no fields to list")
    return rows


def _constants(found: Any) -> dict[str, str]:
    """What the names stand for that the module of a class defines or imports from another one of the package."""
    values = {}
    for name, member in found.module.members.items():
        with contextlib.suppress(griffe.AliasResolutionError, KeyError):
            target = member.final_target if member.is_alias else member
            if target.is_attribute and target.value is not None:
                values[name] = str(target.value)
    return values


def _settings_table(match: re.Match[str]) -> str:
    lines = ["| field | default | unit | meaning |", "|---|---|---|---|"]
    for row in settings_of(match[1]):
        name, default, unit, meaning = (cell.replace("|", "\\|") for cell in row)
        lines.append(f"| `{name}` | `{default}` | {unit} | {meaning} |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Fill in what is generated, and name the repository's files where they are linked to."""
    if "{{ api rest }}" in markdown:
        public = public_names()
        if bare := [name for name in public if not is_documented(name)]:
            raise PluginError(f"public names without a docstring: {bare}")
        canonical = {_resolve(name).canonical_path for name in re.findall(r"^::: ([\w.]+)", markdown, re.MULTILINE)}
        rest = [name for name in public if _resolve(name).canonical_path not in canonical]
        markdown = markdown.replace("{{ api rest }}", "\n\n".join(f"::: {_shown(name)}" for name in rest))
    markdown = re.sub(r"^\{\{ settings ([\w.]+) \}\}$", _settings_table, markdown, flags=re.MULTILINE)
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def outside(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match[2]))
        if target.is_relative_to(ROOT / "docs") or not target.exists():
            return match[0]
        name = str(target.relative_to(ROOT))
        return f"`{name}`" if match[1].strip("`") in (name, target.name) else f"{match[1]} (`{name}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)\)", outside, markdown)
