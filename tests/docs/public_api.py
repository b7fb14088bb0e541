"""The public names and signatures, as text: what releases of one minor version promise to keep.

The environments of `rollwise.tasks` and `rollwise.verl` are public too, and may still change: they are not pinned.

python tests/docs/public_api.py    # writes public_api.txt anew, after a change that was meant
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINNED = Path(__file__).with_suffix(".txt")
sys.path.insert(0, str(ROOT / "docs"))

import _hooks  # noqa: E402

#: Modules whose names are promised.
PROMISED = (
    "rollwise",
    *(f"rollwise.{name}" for name in ("allocation", "replay", "simulation", "tasks.arithmetic", "trl")),
)


def describe() -> str:
    """Read from the source, so that it is the same on every Python, TRL and machine."""
    lines = []
    for name in _hooks.public_names():
        if name.rpartition(".")[0] not in PROMISED:
            continue
        found = _hooks._resolve(name)
        if found.is_class:
            bases = ", ".join(str(base) for base in found.bases)
            lines.append(f"class {name}({bases})")
            for member_name, member in found.members.items():
                if member_name.startswith("_") and member_name != "__init__":
                    continue
                if member.is_function:
                    lines.append(f"    def {member_name}{_signature(member)}")
                elif member.is_attribute and "property" in member.labels:
                    lines.append(f"    property {member_name}: {member.annotation}")
                elif member.is_attribute and "class-attribute" in member.labels:
                    lines.append(f"    {member_name}: {member.annotation} = {_default(member.value)}")
        elif found.is_function:
            lines.append(f"def {name}{_signature(found)}")
        else:
            lines.append(f"{name}: {found.annotation}")
    return "\n".join(lines) + "\n"


def _signature(function) -> str:
    marks = {"variadic positional": "*", "variadic keyword": "**"}
    parts, starred = [], False
    for parameter in function.parameters:
        kind = parameter.kind.value
        if kind == "keyword-only" and not starred:
            parts.append("*")
        starred |= kind in ("keyword-only", "variadic positional")
        text = f"{marks.get(kind, '')}{parameter.name}"
        text += f": {parameter.annotation}" if parameter.annotation is not None else ""
        text += f" = {parameter.default}" if parameter.default is not None and kind not in marks else ""
        parts.append(text)
    return f"({', '.join(parts)}) -> {function.returns}"


def _default(value) -> str:
    """Without the help texts of fields, which may be reworded."""
    text = str(value)
    return text.partition(", metadata=")[0] + ")" if ", metadata=" in text else text


if __name__ == "__main__":
    PINNED.write_text(describe(), encoding="utf-8")
