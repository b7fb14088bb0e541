"""Data sets of questions with answers for `math` and `search_qa`: public ones by name, hub names and files.

The public ones are loaded from the Hugging Face hub with `datasets` when they are asked for; nothing of them is part of
this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollwise.errors import ConfigError
from rollwise.evaluation.benchmarks import (
    ANSWER_COLUMNS,
    HUB_BENCHMARKS,
    LEVEL_COLUMNS,
    PROBLEM_COLUMNS,
    answer_text,
    column_of,
    is_file_name,
    rows_of_file,
)
from rollwise.tasks.levels import dataset_of, is_held_out, prompt_id

__all__ = ["SOURCES", "Source", "load_questions"]


@dataclass(frozen=True)
class Source:
    """Where a public data set lies on the hub.

    Attributes:
        hub: Its name.
        question: Column of the question.
        answer: Column of the right answer, or of a list of right answers.
        train: Its split to train on.
        test: Its held-out split; None where it has none.
        config: Its configuration; None where it has one only.
        images: Column of a picture or a list of pictures; None where it has none.
        answer_after: What stands in front of the answer in its column; None where the column is the answer.
    """

    hub: str
    question: str
    answer: str
    train: str = "train"
    test: str | None = None
    config: str | None = None
    images: str | None = None
    answer_after: str | None = None


SOURCES: dict[str, Source] = {
    "nq_open": Source("google-research-datasets/nq_open", "question", "answer", test="validation"),
    "gsm8k": Source("openai/gsm8k", "question", "answer", test="test", config="main", answer_after="####"),
    "geoqa": Source("leonardPKU/GEOQA_8K_R1V", "problem", "answer", test="test", images="images"),
    "deepmath": Source("zwhe99/DeepMath-103K", "question", "final_answer"),
    "polaris": Source("POLARIS-Project/Polaris-Dataset-53K", "problem", "answer"),
    "deepscaler": Source("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer"),
    **{
        name: Source(place.hub, place.problem, place.answer, place.split, config=place.config)
        for name, place in HUB_BENCHMARKS.items()
    },
}
"""Public data sets by name: NQ's questions, the problems of GSM8K, AIME and others, those of GeoQA with pictures."""


class _AsksQuestions(Protocol):
    """An environment whose problems come from data."""

    name: str

    def spec_of(self, question: str, answers: Sequence[str], level: str | None) -> dict[str, Any]: ...


def load_questions(
    environment: Any,
    source: str,
    *,
    test_source: str | None = None,
    question_column: str | None = None,
    answer_column: str | None = None,
    images_column: str | None = None,
    num_train: int | None = None,
    num_test: int | None = None,
    seed: int = 0,
    as_messages: bool = True,
    with_instructions: bool = True,
) -> Any:
    """Load the data set for a training run on questions from data.

    The test side is `test_source`, or else the source's own held-out split, or else one question in eight by a hash. A
    question of the test side is never on the train side, nor is one twice on a side.

    Args:
        environment: A `Mathematics` or `SearchQA`.
        source: A name of `SOURCES`, a JSONL, JSON or Parquet file, or a name on the hub whose split `train` is taken.
        test_source: Another such source to measure on: its held-out split, or all of it where it has one split only.
            For example train on `deepmath`, test on `aime24`.
        question_column: Column of the question in a file or hub data set; by default the first usual one it has.
        answer_column: Column of the answer, or of a list of answers.
        images_column: Column of a picture, or of a list of pictures, for problems that have some.
        num_train: Size of the train side; None takes all.
        num_test: Size of the test side; None takes all.
        seed: Picks and shuffles the train side; the test side is picked the same on every call.
        as_messages: See `rollwise.tasks.levels.first_prompt`.
        with_instructions: See `rollwise.tasks.levels.first_prompt`.

    Returns:
        A `datasets.DatasetDict` with the splits `train` and `test`; columns as in `rollwise.tasks.levels.dataset_of`,
        and `answer` (the first right answer, for `math_reward`).

    Raises:
        ConfigError: No such file or column, a row without question or answer, or fewer questions than are asked for.
        OSError, ValueError, datasets.exceptions.DatasetsError: The hub cannot be reached, or has no such data set.
    """
    import datasets

    if not hasattr(environment, "spec_of"):
        raise ConfigError(f"{environment.name} makes its own levels: use rollwise.tasks.levels.load_dataset")
    columns = (question_column, answer_column, images_column)
    own = _questions(environment, source, columns, held_out=False)
    if test_source is not None:
        test = _questions(environment, test_source, columns, held_out=True)
    elif source in SOURCES and SOURCES[source].test:
        test = _questions(environment, source, columns, held_out=True)
    else:
        test = {key: question for key, question in own.items() if is_held_out(question.spec)}
    train = {key: question for key, question in own.items() if key not in test}
    sides = {
        "train": _pick(train, num_train, seed, source, "num_train"),
        "test": _pick(test, num_test, 0, test_source or source, "num_test"),
    }
    return datasets.DatasetDict(
        {
            side: _with_columns(
                dataset_of(
                    environment,
                    [question.spec for question in questions],
                    as_messages=as_messages,
                    with_instructions=with_instructions,
                ),
                questions,
            )
            for side, questions in sides.items()
        }
    )


@dataclass(frozen=True)
class _Question:
    spec: dict[str, Any]
    answer: str
    images: tuple[Any, ...]


def _questions(
    environment: _AsksQuestions, source: str, columns: tuple[str | None, str | None, str | None], *, held_out: bool
) -> dict[str, _Question]:
    """Read a source; its questions by their ids, each once."""
    place = SOURCES.get(source)
    if place is not None:
        rows: Sequence[Mapping[str, Any]] = _from_hub(place, place.test if held_out and place.test else place.train)
    elif is_file_name(source):
        rows = rows_of_file(Path(source).expanduser())
    elif Path(source).suffix or source.count("/") != 1:
        raise ConfigError(
            f"unknown questions {source!r}: choose from {', '.join(SOURCES)}, a .jsonl, .json or .parquet file, or a "
            "name on the hub such as owner/name"
        )
    else:
        rows = _from_hub(Source(source, "", ""), "train")
    known = list(dict.fromkeys(column for row in rows for column in row))
    if place is None:
        asked_question, asked_answer, asked_images = columns
        place = Source(
            source,
            column_of(known, asked_question, PROBLEM_COLUMNS, source, "question"),
            column_of(known, asked_answer, (*ANSWER_COLUMNS, "answers"), source, "answer"),
            images=None if asked_images is None else column_of(known, asked_images, (), source, "images"),
        )
    questions: dict[str, _Question] = {}
    for number, row in enumerate(rows):
        question, answers = str(row.get(place.question) or "").strip(), _answers(row.get(place.answer), place)
        images = _pictures(row, place)
        if images:
            question = question.replace("<image>", "").strip()
        if not question or not answers:
            column = place.question if not question else place.answer
            raise ConfigError(f"{source!r} has nothing in column {column!r} of row {number}: fill it or drop the row")
        level = next((str(row[column]) for column in LEVEL_COLUMNS if row.get(column) is not None), None)
        spec = environment.spec_of(question, answers, level)
        questions.setdefault(prompt_id(environment.name, spec), _Question(spec, answers[0], images))
    return questions


def _answers(value: Any, place: Source) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    texts = [answer_text(one) for one in values if one is not None]
    if place.answer_after is not None:
        texts = [text.rpartition(place.answer_after)[2].strip() for text in texts]
    return [text for text in texts if text]


def _pictures(row: Mapping[str, Any], place: Source) -> tuple[Any, ...]:
    value = None if place.images is None else row.get(place.images)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _pick(questions: dict[str, _Question], num: int | None, seed: int, source: str, name: str) -> list[_Question]:
    if num is not None and not 0 <= num <= len(questions):
        raise ConfigError(f"{name} is {num}, but {source!r} has {len(questions)} questions on that side: ask for fewer")
    order = np.random.default_rng(seed).permutation(len(questions))
    found = list(questions.values())
    return [found[i] for i in order[:num]]


def _with_columns(table: Any, questions: list[_Question]) -> Any:
    import datasets

    table = table.add_column("answer", [question.answer for question in questions])
    if not any(question.images for question in questions):
        return table
    columns = {name: list(table[name]) for name in table.column_names}
    columns["images"] = [list(question.images) for question in questions]
    return datasets.Dataset.from_dict(columns).cast_column("images", datasets.List(datasets.Image()))


def _from_hub(place: Source, split: str) -> Sequence[Mapping[str, Any]]:
    import datasets

    return list(datasets.load_dataset(place.hub, name=place.config, split=split))
