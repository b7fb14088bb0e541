"""Search question answering: several turns of searching a corpus of one's own, then an answer that must match exactly.

The corpus is a JSONL or Parquet file with one passage per row; BM25 over it runs locally, by bm25s.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import string
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rollwise.bounds import check_at_least
from rollwise.errors import ConfigError, VersionError
from rollwise.evaluation.benchmarks import column_of
from rollwise.tasks.actions import after_thinking
from rollwise.tasks.environment import LanguageEnvironment, Observation, Outcome, Spec

__all__ = ["TEXT_COLUMNS", "TITLE_COLUMNS", "Corpus", "Passage", "SearchQA", "exact_match", "normalize_answer"]

TEXT_COLUMNS = ("text", "contents", "passage", "content", "body")
"""Usual columns of a passage."""

TITLE_COLUMNS = ("title", "name")
"""Usual columns of its title."""

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_MAX_QUERY_CHARACTERS = 1_000
_MARK = "corpus.json"


def normalize_answer(text: str) -> str:
    """Normalise an answer as SQuAD's and NQ-open's evaluations do.

    Small letters; without ASCII punctuation; without the articles a, an and the; single spaces.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Tell whether a prediction is one of the right answers, after `normalize_answer` of both."""
    return normalize_answer(prediction) in {normalize_answer(answer) for answer in answers}


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage that was found.

    Attributes:
        title: Its title; empty where the corpus has none.
        text: The passage.
        score: BM25's, above 0.
    """

    title: str
    text: str
    score: float


class Corpus:
    """Passages, and a BM25 index of them.

    Args:
        path: A JSONL, JSON or Parquet file with one passage per row. The rows are read from disk when they are found;
            the index is in memory.
        text_column: Column of the passage; by default the first of `TEXT_COLUMNS` that there is.
        title_column: Column of the title, which is searched, too; by default the first of `TITLE_COLUMNS`, or none.
        index_folder: Where the index is kept, so that it is made once; None makes it anew each time. One of another
            corpus is refused.
        show_progress: Whether making the index shows its progress.

    Raises:
        ConfigError: No such file or column, no passages, or an index of another corpus.
        VersionError: bm25s or datasets is not installed.
    """

    def __init__(
        self,
        path: str,
        text_column: str | None = None,
        title_column: str | None = None,
        index_folder: str | None = None,
        show_progress: bool = False,
    ) -> None:
        try:
            import bm25s
            import datasets
        except ImportError as error:
            raise VersionError(f"searching needs {error.name}: pip install 'rollwise[envs]'") from error
        self._tokenize = bm25s.tokenize
        kind = _FORMATS.get(Path(path).suffix.lower())
        if kind is None or not Path(path).is_file():
            place = Path(path).absolute().parent
            raise ConfigError(f"corpus {path!r} is no {', '.join(_FORMATS)} file (looked in {place})")
        try:
            self._rows = datasets.load_dataset(kind, data_files=path, split="train")
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            raise ConfigError(f"corpus {path!r} cannot be read: {error}") from None
        except StopIteration:  # what datasets makes of an empty file
            self._rows = ()
        if not len(self._rows):
            raise ConfigError(f"corpus {path!r} has no passages: give a file with at least one row")
        columns = self._rows.column_names
        self._text = column_of(columns, text_column, TEXT_COLUMNS, path, "text")
        self._title = None
        if title_column or not {*TITLE_COLUMNS}.isdisjoint(columns):
            self._title = column_of(columns, title_column, TITLE_COLUMNS, path, "title")
        mark = self._mark(path)
        if index_folder and Path(index_folder).exists():
            self._index = _load(bm25s, Path(index_folder), mark)
            return
        self._index = bm25s.BM25()
        texts = [" ".join(self._shown(row)) for row in self._rows]
        tokens = bm25s.tokenize(texts, stopwords="en", show_progress=show_progress)
        self._index.index(tokens, show_progress=show_progress)
        if index_folder:
            _save(self._index, Path(index_folder), mark)

    def __len__(self) -> int:
        return len(self._rows)

    def search(self, query: str, num_passages: int) -> list[Passage]:
        """Return the passages with the best BM25 scores, best first; none of score 0.

        Args:
            query: Words; English stop words do not count.
            num_passages: How many at most.
        """
        words = self._tokenize([query[:_MAX_QUERY_CHARACTERS]], stopwords="en", return_ids=False, show_progress=False)
        if not words[0]:
            return []
        found = self._index.retrieve(words, k=min(num_passages, len(self)), show_progress=False)
        passages = []
        for number, score in zip(found.documents[0].tolist(), found.scores[0].tolist(), strict=True):
            if score > 0:
                title, text = self._shown(self._rows[number])
                passages.append(Passage(title, text, score))
        return passages

    def _shown(self, row: dict[str, Any]) -> tuple[str, str]:
        return str(row[self._title] or "") if self._title else "", str(row[self._text] or "")

    def _mark(self, path: str) -> dict[str, Any]:
        """What tells this corpus from others, JSON-able."""
        with open(path, "rb") as file:
            start = hashlib.blake2s(file.read(1 << 20)).hexdigest()
        columns = [self._title, self._text]
        return {"passages": len(self), "bytes": Path(path).stat().st_size, "start": start, "columns": columns}


@dataclass(kw_only=True, eq=False)
class SearchQA(LanguageEnvironment):
    """Answer a question, after searching a corpus as often as the turns allow.

    `<search>words</search>` shows the best passages, `<answer>...</answer>` ends the episode. What stands before a
    `</think>` is not looked at; of the rest, the first tag that is closed counts, for what follows it may be made up.
    The spec is `{"question": "...", "answers": ["...", ...]}`; questions come from data, see
    `rollwise.tasks.questions`.

    Args:
        corpus: JSONL or Parquet file of the passages; see `Corpus`, also for the next three.
        text_column: Column of the passage.
        title_column: Column of the title.
        index_folder: Where the index is kept.
        max_turns: Searches and the answer together.
        num_passages: Passages that a search shows.
        max_passage_characters: Characters of a passage that are shown, at most.
        right_reward: Reward of an answer that matches one of the right ones exactly, after `normalize_answer`.
        wrong_reward: Reward of any other answer.
        search_reward: Reward of a search; a negative one makes searching cost something.
    """

    corpus: str
    text_column: str | None = None
    title_column: str | None = None
    index_folder: str | None = None
    max_turns: int = 4
    num_passages: int = 3
    max_passage_characters: int = 1_000
    right_reward: float = 1.0
    wrong_reward: float = 0.0
    search_reward: float = 0.0
    _found: Corpus = field(init=False, repr=False)

    name: ClassVar[str] = "search_qa"
    may_hang: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "num_passages", "max_passage_characters")
        self._found = _corpus(self.corpus, self.text_column, self.title_column, self.index_folder)

    @property
    def instructions(self) -> str:
        """The rules, and how to answer."""
        return (
            "Answer the question in a few words. To look something up, write <search>words to look for</search>; the "
            "best passages will be shown to you. Give your answer as <answer>the answer</answer>. You have "
            f"{self.max_turns} turns, the answer included."
        )

    def draw_spec(self, level: str, rng: np.random.Generator) -> dict[str, Any]:
        """Refuse: the questions come from data.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("questions come from data: load them with rollwise.tasks.questions")

    def spec_of(self, question: str, answers: Sequence[str], level: str | None) -> dict[str, Any]:
        """Make a spec of a row of data; any of its answers is right."""
        return {"question": question, "answers": list(answers)} | ({} if level is None else {"level": level})

    def _begin(self, spec: Spec) -> Observation:
        question, answers = spec.get("question"), spec.get("answers")
        if not isinstance(question, str) or not question.strip():
            raise ConfigError(f"question is {question!r}; a spec of search_qa needs it as a text")
        if not isinstance(answers, list | tuple) or not answers or not all(isinstance(a, str) for a in answers):
            raise ConfigError(f"answers is {answers!r}; a spec of search_qa needs a list of texts, at least one")
        self._answers: Sequence[str] = answers
        return Observation(f"Question: {question}")

    def _play(self, answer: str) -> Outcome:
        kind, content = _first_call(after_thinking(answer))
        if kind == "answer":
            right = exact_match(content, self._answers)
            return Outcome(self._last, self.right_reward if right else self.wrong_reward, done=True, is_success=right)
        if kind == "search":
            return Outcome(Observation(self._shown(content)), self.search_reward)
        return self._malformed(("<search>words</search>", "<answer>the answer</answer>"))

    def _shown(self, query: str) -> str:
        passages = self._found.search(query, self.num_passages)
        shown = [
            f"[{number}] {f'{passage.title}: ' if passage.title else ''}{passage.text[: self.max_passage_characters]}"
            for number, passage in enumerate(passages, 1)
        ] or ["Nothing was found."]
        last = ["This is your last turn: answer now."] if self._turns == self.max_turns - 1 else []
        return "\n".join(["<information>", *shown, "</information>", *last])


def _first_call(text: str) -> tuple[str, str]:
    """Return the kind and the content of the tag that is closed first; two empty texts where there is none."""
    ends = {kind: end for kind in ("search", "answer") if (end := text.find(f"</{kind}>")) >= 0}
    for kind in sorted(ends, key=ends.__getitem__):
        opening = f"<{kind}>"
        start = text.rfind(opening, 0, ends[kind])
        if start >= 0 and (content := text[start + len(opening) : ends[kind]].strip()):
            return kind, content
    return "", ""


def _load(bm25s: Any, folder: Path, mark: dict[str, Any]) -> Any:
    try:
        kept = json.loads((folder / _MARK).read_text())
    except (OSError, ValueError):
        kept = None
    if kept != mark:
        raise ConfigError(
            f"index_folder {str(folder)!r} holds no index of this corpus ({kept} instead of {mark}): delete it, and "
            "it is made anew, or name another"
        )
    return bm25s.BM25.load(str(folder), mmap=True)


def _save(index: Any, folder: Path, mark: dict[str, Any]) -> None:
    """Write an index whole or not at all; where another process was quicker, its index is the same."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        index.save(str(temporary))
        (temporary / _MARK).write_text(json.dumps(mark))
        with contextlib.suppress(FileExistsError, OSError):
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@lru_cache(maxsize=4)
def _corpus(path: str, text_column: str | None, title_column: str | None, index_folder: str | None) -> Corpus:
    """Return the one corpus that all environments of this process with these settings share."""
    return Corpus(path, text_column, title_column, index_folder, show_progress=sys.stderr.isatty())
