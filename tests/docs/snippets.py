"""Commands and code in README and docs, found so that tests can run them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: First words that make an indented block one of commands.
PROGRAMS = ("rollwise", "make", "pip", "python", "bash", "mkdocs", "nox", "torchrun", "accelerate", "ray", "#SBATCH")


@dataclass(frozen=True)
class Block:
    """A block of a page: fenced ones by the language they name, indented ones as "", or "yaml" where they look so."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    return [block for page in PAGES for block in _blocks_of(page)]


def _blocks_of(page: Path) -> list[Block]:
    found, fence, lines = [], None, page.read_text(encoding="utf-8").splitlines()
    inside: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):
        opening = re.match(r"\s*```([\w.+-]*)", line)
        if fence is not None:
            if opening:
                found.append(Block(page, fence[0], fence[1], "\n".join(inside) + "\n"))
                fence, inside = None, []
            else:
                inside.append(line)
        elif opening:
            fence = (number + 1, opening[1])
        elif line.startswith("    ") and (inside or not lines[number - 2].strip()):
            inside.append(line[4:])
        elif inside:
            language = "yaml" if re.match(r"[a-z_]+:( |$)", inside[0]) else ""
            found.append(Block(page, number - len(inside), language, "\n".join(inside) + "\n"))
            inside = []
    return found


def commands() -> list[tuple[str, list[str]]]:
    """Where each command stands and its words; a `rollwise` command in running text counts too."""
    found = []
    for block in blocks():
        if block.language in ("bash", "sh", "shell", "console") or block.text.split()[:1] in [[p] for p in PROGRAMS]:
            lines = block.text.replace("\\\n", " ").splitlines()
            words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
            found += [(block.name, command) for command in words if command]
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
            texts = re.findall(r"(?<!`)`(rollwise [^`]+|make [^`]+|pip install [^`]+)`", line)
            found += [(f"{page.relative_to(ROOT)}:{number}", shlex.split(text)) for text in texts]
    return found
