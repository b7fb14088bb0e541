"""A small world that nobody has ever read of: passages about invented people, and questions that need them.

Each person has a passage, and two questions: where they were born, and what they worked as. Every name, town and trade
is one word, so that the embedded agent's tokenizer has one token for each. Nothing here is downloaded, and a model
cannot know an answer without searching.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollwise.files import replacing

__all__ = ["FICTIONS", "corpus_path", "passages", "questions", "questions_path", "words"]

FICTIONS = "fictions"
"""What a recipe calls this corpus and its questions."""

NUM_PEOPLE = 400
_SEED = 20_240_607

_FIRST = (
    "Abel Berta Cosmo Dalia Edgar Fenna Gustav Hanna Ivor Juna Kaspar Lena Milo Nora Oskar Petra Quirin Rosa Sven Tilda"
)
_LAST = (
    "Amberg Borowy Calder Dorn Elster Fabri Galant Hollin Isarn Jorvik Kestrel Lindqvist Maron Nyland Orsini Pavlik "
    "Quist Rovere Salter Tamsin Ulmer Varga Weller Yarrow Zeman"
)
_TOWNS = (
    "Arnova Belmar Corvath Dunmere Eskil Farlow Grenna Halvik Istrel Jarnow Kolbeck Lursan Mirova Norhaven Ostel "
    "Perrin Quella Rastad Selmore Tarnby"
)
_TRADES = (
    "baker carpenter doctor engraver farmer glazier hatter innkeeper jeweller miller notary organist painter roofer "
    "sailor tailor upholsterer vintner weaver zoologist"
)
_SENTENCES = "Question Where was born What did do as Nothing found information search answer in worked a"


def passages() -> list[dict[str, str]]:
    """One passage per person: `title` (their name) and `text`."""
    return [
        {
            "title": person["name"],
            "text": f"{person['name']} was born in {person['town']}. {person['name']} worked as a {person['trade']}.",
        }
        for person in _people()
    ]


def questions() -> list[dict[str, Any]]:
    """Two questions per person: `question`, `answers` (one) and `level`, which is `born` or `work`."""
    found = []
    for person in _people():
        born = {"question": f"Where was {person['name']} born?", "answers": [person["town"]], "level": "born"}
        work = {"question": f"What did {person['name']} do?", "answers": [person["trade"]], "level": "work"}
        found += [born, work]
    return found


def words() -> tuple[str, ...]:
    """Every word of the passages and the questions, for `rollwise.tasks.agents.build_tokenizer`."""
    text = " ".join((_FIRST, _LAST, _TOWNS, _TRADES, _SENTENCES))
    return tuple(dict.fromkeys(text.split()))


def corpus_path() -> Path:
    """Write the passages, unless they are there already, and return the file."""
    return _written("corpus.jsonl", passages())


def questions_path() -> Path:
    """Write the questions, unless they are there already, and return the file."""
    return _written("questions.jsonl", questions())


def _written(name: str, rows: list[Any]) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    file = Path(cache) / "rollwise" / FICTIONS / name
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        with replacing(file) as partial:
            partial.write_text(text, encoding="utf-8")
    return file


def _people() -> list[Mapping[str, str]]:
    rng = random.Random(_SEED)
    names = [f"{first} {last}" for first in _FIRST.split() for last in _LAST.split()]
    return [
        {"name": name, "town": rng.choice(_TOWNS.split()), "trade": rng.choice(_TRADES.split())}
        for name in rng.sample(names, NUM_PEOPLE)
    ]
