"""Problems with right answers: public benchmarks by name, local files, and the embedded task.

The public ones are loaded from the Hugging Face hub with `datasets` when they are asked for; nothing of them is part of
this package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwise.errors import ConfigError
from rollwise.tasks import arithmetic

ARITHMETIC = "arithmetic"

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""What a mathematical problem is followed by, unless something else is asked for."""

PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer")
_ID_COLUMNS = ("id", "unique_id", "problem_id", "problem_idx")
LEVEL_COLUMNS = ("level", "difficulty")
_FORMATS = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class HubBenchmark:
    """Where a public benchmark lies on the hub.

    Attributes:
        hub: The data set's name.
        split: Its split.
        problem: Column of the question.
        answer: Column of the right answer; of a list, the first element is taken.
        config: The data set's configuration; None where it has one only.
    """

    hub: str
    split: str
    problem: str
    answer: str
    config: str | None = None


HUB_BENCHMARKS: dict[str, HubBenchmark] = {
    "math500": HubBenchmark("HuggingFaceH4/MATH-500", "test", "problem", "answer"),
    "aime24": HubBenchmark("zwhe99/aime90", "2024", "problem", "expected_answer"),
    "aime25": HubBenchmark("MathArena/aime_2025", "train", "problem", "answer"),
    "aime26": HubBenchmark("MathArena/aime_2026", "train", "problem", "answer"),
    "hmmt_feb25": HubBenchmark("MathArena/hmmt_feb_2025", "train", "problem", "answer"),
    "hmmt_feb26": HubBenchmark("MathArena/hmmt_feb_2026", "train", "problem", "answer"),
    "amc23": HubBenchmark("zwhe99/amc23", "test", "question", "answer"),
    "minerva": HubBenchmark("math-ai/minervamath", "test", "question", "answer"),
    "olympiadbench": HubBenchmark(
        "Hothan/OlympiadBench", "train", "question", "final_answer", config="OE_TO_maths_en_COMP"
    ),
}


@dataclass(frozen=True)
class EvaluationProblem:
    """One problem.

    Attributes:
        problem_id: The data set's own id where it has one, else the number of the row; unique in its benchmark.
        problem: The question.
        answer: The right answer.
        level: Its difficulty as the data set names it; None where it does not.
    """

    problem_id: str
    problem: str
    answer: str
    level: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """Problems, and how they are asked and checked unless something else is asked for.

    Attributes:
        name: A name that can be a folder's.
        problems: At least one.
        verifier: `math` or `exact`.
        instruction: What follows each problem; empty for nothing.
        max_tokens: Tokens of a completion, at most; None leaves it to the command.
        source: The hub name or file it was read from.
    """

    name: str
    problems: Sequence[EvaluationProblem]
    verifier: str
    instruction: str
    max_tokens: int | None
    source: str


def choices() -> str:
    """Return what `load_benchmark` takes, in words."""
    return f"{', '.join((ARITHMETIC, *HUB_BENCHMARKS))}, or a {', '.join(_FORMATS)} file"


def canonical(name: str) -> str:
    """Return a benchmark's name as the table has it: `MATH-500`, `math_500` and `math500` are one."""
    bare = _bare(name)
    return next((known for known in (ARITHMETIC, *HUB_BENCHMARKS) if _bare(known) == bare), name)


def is_file_name(name: str) -> bool:
    """Tell whether a name means a local file."""
    return Path(name).suffix.lower() in _FORMATS


def load_benchmark(
    name: str, *, problem_column: str | None = None, answer_column: str | None = None, limit: int | None = None
) -> Benchmark:
    """Load a benchmark.

    Args:
        name: `arithmetic`, a name of `HUB_BENCHMARKS`, or a JSONL, JSON or Parquet file.
        problem_column: A file's column of the question; by default the first of `PROBLEM_COLUMNS` that it has.
        answer_column: A file's column of the answer; by default the first of `ANSWER_COLUMNS` that it has.
        limit: The first so many problems; None takes all.

    Raises:
        ConfigError: No such benchmark, file or column, a row without problem or answer, or an id that comes twice.
        OSError, ValueError, datasets.exceptions.DatasetsError: The hub cannot be reached, or has no such data set.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}, but must be at least 1 problem")
    known = canonical(name)
    if known == ARITHMETIC:
        problems = [
            EvaluationProblem(p.prompt, p.prompt, p.answer, p.level) for p in arithmetic.held_out_problems()[:limit]
        ]
        return Benchmark(known, problems, "exact", "", arithmetic.MAX_COMPLETION_TOKENS, "rollwise.tasks.arithmetic")
    if known in HUB_BENCHMARKS:
        place = HUB_BENCHMARKS[known]
        problems = to_problems(_from_hub(place)[:limit], place.problem, place.answer, place.hub)
        return Benchmark(known, problems, "math", INSTRUCTION, None, place.hub)
    if is_file_name(name):
        rows = rows_of_file(Path(name).expanduser())[:limit]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        problem = column_of(columns, problem_column, PROBLEM_COLUMNS, name, "problem")
        answer = column_of(columns, answer_column, ANSWER_COLUMNS, name, "answer")
        problems = to_problems(rows, problem, answer, name)
        return Benchmark(Path(name).stem, problems, "math", INSTRUCTION, None, str(name))
    raise ConfigError(f"unknown benchmark {name!r}: choose from {choices()}")


def to_problems(
    rows: Iterable[Mapping[str, Any]], problem_column: str, answer_column: str, source: str
) -> list[EvaluationProblem]:
    """Turn rows into problems.

    Args:
        rows: Rows of a data set.
        problem_column: Its column of the question.
        answer_column: Its column of the answer: a text, a number, or a list whose first element is taken.
        source: Its name, for error messages.

    Raises:
        ConfigError: No rows, a row without problem or answer, or an id that comes twice.
    """
    problems: list[EvaluationProblem] = []
    for number, row in enumerate(rows):
        question, answer = row.get(problem_column), row.get(answer_column)
        if isinstance(answer, list | tuple):
            answer = answer[0] if answer else None
        for column, value in ((problem_column, question), (answer_column, answer)):
            if value is None or not str(value).strip():
                raise ConfigError(
                    f"{source!r} has nothing in column {column!r} of row {number}: fill it or drop the row"
                )
        problem_id = _first(row, _ID_COLUMNS)
        level = _first(row, LEVEL_COLUMNS)
        problems.append(
            EvaluationProblem(
                str(number) if problem_id is None else str(problem_id),
                str(question),
                answer_text(answer),
                None if level is None else str(level),
            )
        )
    if not problems:
        raise ConfigError(f"{source!r} has no problems: give a file or a split with at least one row")
    seen: set[str] = set()
    for made in problems:
        if made.problem_id in seen:
            raise ConfigError(
                f"{source!r} has the id {made.problem_id!r} twice: ids must differ, or leave that column out"
            )
        seen.add(made.problem_id)
    return problems


def _bare(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def answer_text(answer: Any) -> str:
    """Write an answer; 12.0, as Parquet gives an integer of a column with gaps, is 12."""
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer).strip()


def _first(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    return next((row[column] for column in columns if row.get(column) is not None), None)


def column_of(columns: Sequence[str], asked: str | None, usual: Sequence[str], name: str, what: str) -> str:
    """Return the column that is asked for, or else the first usual one.

    Raises:
        ConfigError: There is no such column, or no column at all.
    """
    if not columns:
        raise ConfigError(f"{name!r} has no problems: give a file with at least one row")
    found = next((column for column in ((asked,) if asked else usual) if column in columns), None)
    if found is None:
        wanted = repr(asked) if asked else " or ".join(map(repr, usual))
        raise ConfigError(
            f"{name!r} has no column {wanted} (it has {', '.join(columns)}): name the right one with {what}_column "
            f"(on the command line --{what}-column)"
        )
    return found


def _from_hub(place: HubBenchmark) -> list[dict[str, Any]]:
    import datasets

    return list(datasets.load_dataset(place.hub, name=place.config, split=place.split))


def rows_of_file(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSONL, JSON or Parquet file.

    Raises:
        ConfigError: There is no such file, or it does not hold rows.
    """
    if not path.is_file():
        raise ConfigError(f"no benchmark file {str(path)!r} (looked in {path.absolute().parent})")
    try:
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq

            rows = pq.read_table(path).to_pylist()
        elif path.suffix.lower() == ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))
        else:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (ValueError, OSError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{str(path)!r} must hold objects, one per problem, each with a problem and an answer")
    return rows
