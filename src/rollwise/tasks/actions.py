"""Reading the model's answer: the tag it must stand in, and the spellings of an action."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["DIRECTIONS", "after_thinking", "numbered", "parse_action", "spellings", "tagged"]

_MAX_BARE_CHARACTERS = 64
_AROUND = " \t\r\n.,;:!?\"'`*_()[]{}"


def spellings(actions: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Map every spelling of every action, in small letters, to the action: the name itself and what is listed."""
    return {spelling.lower(): action for action, others in actions.items() for spelling in (action, *others)}


DIRECTIONS: dict[str, str] = spellings(
    {
        "left": ("l", "←", "west", "w", "move left", "go left"),
        "down": ("d", "↓", "south", "s", "move down", "go down"),
        "right": ("r", "→", "east", "e", "move right", "go right"),
        "up": ("u", "↑", "north", "n", "move up", "go up"),
    }
)
"""Spellings of the four directions."""


def numbered(actions: Sequence[str]) -> dict[str, str]:
    """Return `DIRECTIONS` with a number more for each of the actions: its place in the list, from 0."""
    return DIRECTIONS | {str(number): action for number, action in enumerate(actions)}


def after_thinking(text: str) -> str:
    """Return what follows the last `</think>`, or the whole text where there is none."""
    return text.rpartition("</think>")[2]


def tagged(text: str, tag: str) -> str | None:
    """Return what stands in the last `<tag>...</tag>`, without spaces around it; None where none is closed.

    The opening tag is the last one before the last closing tag, so that tags do not nest. Takes linear time.
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def parse_action(text: str, known: Mapping[str, str], tag: str = "action") -> str | None:
    """Read an action.

    Looks only behind the last `</think>`. There, what stands in the last `<action>...</action>` counts; without such
    tags, the whole text, which may also begin with `action:` or stand in `\\boxed{}`. Case, spaces and punctuation
    around it do not matter.

    Args:
        text: The model's answer.
        known: Spellings in small letters, each with its action; see `spellings`.
        tag: The name of the tag.

    Returns:
        The action; None for a malformed answer. Never raises on any text.
    """
    text = after_thinking(text)
    content = tagged(text, tag)
    if content is None:
        content = text.strip()
        if len(content) > _MAX_BARE_CHARACTERS:
            return None
    content = content[:_MAX_BARE_CHARACTERS].lower()
    found = known.get(content)
    if found is not None:
        return found
    content = re.sub(rf"^\s*(?:{re.escape(tag)}\s*[:=]|\\boxed)", "", content).strip(_AROUND)
    return known.get(" ".join(content.split()))
