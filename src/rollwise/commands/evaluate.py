"""`rollwise evaluate`: samples of a model on benchmarks, verified, and the figures made of them.

Imported without torch; what needs it is imported once something is to be generated.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rollwise.commands.evaluate_tables import evaluation_notes, evaluation_tables
from rollwise.commands.evaluate_view import EvaluateView
from rollwise.commands.sources import model_source
from rollwise.commands.view import quiet_libraries
from rollwise.errors import RollwiseError
from rollwise.evaluation.benchmarks import Benchmark, canonical, choices, is_file_name, load_benchmark
from rollwise.evaluation.generate import Engine, Sampling, make_engine
from rollwise.evaluation.results import aes_results, benchmark_results, mean_results
from rollwise.evaluation.store import Row, SampleStore
from rollwise.evaluation.verify import RIGHT, UNSCORED, Verifier, make_verifier
from rollwise.records.summary import SUMMARY, versions, without_secrets, write_json
from rollwise.usage import UsageError, missing_extra, one_line, require

_LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "pyarrow")
_DEFAULT_MAX_TOKENS = 4096
_WEIGHTS = ("*.safetensors", "*.bin", "config.json")


@dataclass(frozen=True)
class Options:
    """What `rollwise evaluate` was asked for, beside the model and the benchmarks.

    Attributes:
        samples: Completions of each problem.
        ks: The k of pass@k; by default 1 and `samples`.
        output: The folder; `runs/evaluate-<model>` by default.
        temperature: Of the sampling.
        top_p: Of the sampling.
        max_tokens: Tokens of a completion, at most; by default 10 for the embedded task, else 4096.
        seed: Of the sampling.
        engine: `auto`, `transformers` or `vllm`.
        batch_size: Sequences that are generated at a time; with vLLM, the samples that are stored at a time.
        dtype: Of the weights.
        chat_template: Ask through the tokenizer's chat template, where it has one.
        instruction: What follows each problem; by default the benchmark's.
        verifier: `math` or `exact`; by default the benchmark's.
        timeout_seconds: Time limit for the verification of one sample.
        problem_column: A file's column of the question.
        answer_column: A file's column of the answer.
        limit: The first so many problems of each benchmark.
        reference: Another evaluation's folder, or its `summary.json`, to compare with by AES.
        reverify: Verify the stored samples anew, generate nothing.
        overwrite: Delete the samples of these benchmarks in the folder.
        markdown: Print Markdown tables.
    """

    samples: int = 8
    ks: Sequence[int] = ()
    output: Path | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    seed: int = 0
    engine: str = "auto"
    batch_size: int = 64
    dtype: str = "auto"
    chat_template: bool = True
    instruction: str | None = None
    verifier: str | None = None
    timeout_seconds: float = 10.0
    problem_column: str | None = None
    answer_column: str | None = None
    limit: int | None = None
    reference: Path | None = None
    reverify: bool = False
    overwrite: bool = False
    markdown: bool = False


@dataclass
class _Part:
    """One benchmark of a run: its problems, its samples' place, and how they are made."""

    benchmark: Benchmark
    store: SampleStore
    sampling: Sampling
    verifier: str
    instruction: str

    def prompt(self, number: int) -> str:
        problem = self.benchmark.problems[number].problem
        return f"{problem}\n\n{self.instruction}" if self.instruction else problem


def evaluate(model: str, benchmarks: Sequence[str], options: Options, console: Console | None = None) -> None:
    """Sample a model on benchmarks, verify the answers, and show and write the figures.

    Args:
        model: `arithmetic`, a folder, or a name on the hub.
        benchmarks: Names and files; none with `reverify` takes those that are in the folder.
        options: Everything else.
        console: Where progress and tables are drawn; stdout by default.

    Raises:
        UsageError: Something asked for does not exist or does not fit; nothing has been generated.
        ConfigError: A value is out of its bounds, or the folder's samples were made with other settings.
    """
    require("pyarrow", extra="eval")
    console = console or Console()
    output = options.output or Path("runs") / f"evaluate-{Path(model).name or model}"
    if output.is_file():
        raise UsageError(f"output {str(output)!r} is a file; name a folder")
    if options.reverify and options.overwrite:
        raise UsageError("--overwrite deletes the samples that --reverify would verify; choose one")
    reference = _read_reference(options.reference) if options.reference else None
    names = _names(benchmarks, options, output)
    with EvaluateView(console, model) as view:
        if options.reverify:
            parts = [_stored(output / name, options) for name in names]
            _check_ks(options, parts)
            _reverify(parts, options, view)
        else:
            source = model_source(model)
            view.phase("reading the problems")
            parts = [_asked(_load(name, options), output, options) for name in names]
            _check_ks(options, parts)
            _check_verifiers(parts)
            for part in parts:
                part.store.begin(
                    _settings(part, model, source, options), part.benchmark.problems, overwrite=options.overwrite
                )
            _generate(parts, source, options, view)
    summary = _summary(model, parts, options, reference)
    write_json(output / SUMMARY, summary)
    for table in evaluation_tables(summary):
        if options.markdown:
            console.file.write(table.markdown() + "\n")
        else:
            console.print(table.rich())
    for note in evaluation_notes(summary):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{output} holds {SUMMARY} and, for each benchmark, its samples", markup=False, highlight=False, soft_wrap=True
    )


def _names(benchmarks: Sequence[str], options: Options, output: Path) -> list[str]:
    """Return the benchmarks' names: of what to load or, to verify anew, of folders in `output`."""
    if options.reverify:
        stored = [path.name for path in sorted(output.glob("*")) if SampleStore(path).exists()]
        if not stored:
            raise UsageError(f"{str(output)!r} holds no samples to verify: leave out --reverify to generate some")
        asked = [Path(name).stem if is_file_name(name) else canonical(name) for name in benchmarks]
        if absent := [name for name in asked if name not in stored]:
            raise UsageError(f"{str(output)!r} has no samples of {absent[0]!r} (it has those of {', '.join(stored)})")
        return asked or stored
    if not benchmarks:
        raise UsageError(f"no benchmark: name one or more with --benchmark: {choices()}")
    folders = Counter(Path(name).stem if is_file_name(name) else canonical(name) for name in benchmarks)
    if twice := [name for name, count in folders.items() if count > 1]:
        raise UsageError(
            f"benchmark {twice[0]!r} is named twice: its samples go to a folder of that name; rename a file"
        )
    return list(benchmarks)


def _load(name: str, options: Options) -> Benchmark:
    is_local = canonical(name) == "arithmetic" or is_file_name(name)
    if not is_local:
        require("datasets", extra="eval")
    try:
        return load_benchmark(
            name,
            problem_column=options.problem_column,
            answer_column=options.answer_column,
            limit=options.limit,
        )
    except RollwiseError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # what datasets and huggingface_hub raise is one of these
        raise UsageError(
            f"benchmark {name!r} cannot be loaded from the hub: {one_line(error)[:300]} (a copy in a .jsonl or "
            f".parquet file can be named instead)"
        ) from None


def _asked(benchmark: Benchmark, output: Path, options: Options) -> _Part:
    max_tokens = options.max_tokens or benchmark.max_tokens or _DEFAULT_MAX_TOKENS
    sampling = Sampling(options.samples, options.temperature, options.top_p, max_tokens, options.seed)
    instruction = benchmark.instruction if options.instruction is None else options.instruction
    return _Part(
        benchmark, SampleStore(output / benchmark.name), sampling, options.verifier or benchmark.verifier, instruction
    )


def _stored(folder: Path, options: Options) -> _Part:
    """Return a benchmark as it lies in the folder, with the verifier that is asked for or was used."""
    store = SampleStore(folder)
    made = store.settings()
    sampling = Sampling(**{name: made[name] for name in ("samples", "temperature", "top_p", "max_tokens", "seed")})
    verifier = options.verifier or made["verifier"]
    problems = store.problems()
    benchmark = Benchmark(folder.name, problems, verifier, made["instruction"], made["max_tokens"], made["source"])
    return _Part(benchmark, store, sampling, verifier, made["instruction"])


def _settings(part: _Part, model: str, source: str, options: Options) -> dict[str, Any]:
    """Return what a benchmark's samples and verdicts depend on."""
    sampling = part.sampling
    return {
        "model": without_secrets(model),
        "weights": _fingerprint(Path(source)),
        "source": part.benchmark.source,
        "samples": sampling.samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "engine": options.engine,
        "dtype": options.dtype,
        "chat_template": options.chat_template,
        "instruction": part.instruction,
        "verifier": part.verifier,
    }


def _fingerprint(folder: Path) -> str | None:
    """Tell the weights in a folder from others that may be saved there later; None for a name on the hub."""
    if not folder.is_dir():
        return None
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    return " ".join(f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files)


def _ks(options: Options, samples: int) -> list[int]:
    return sorted(set(options.ks)) or sorted({1, samples})


def _check_ks(options: Options, parts: Iterable[_Part]) -> None:
    for part in parts:
        for k in options.ks:
            if not 1 <= k <= part.sampling.samples:
                raise UsageError(
                    f"--k {k} must be within 1..{part.sampling.samples}, the samples of each problem of "
                    f"{part.benchmark.name}: lower it, or draw more with --samples"
                )


def _check_verifiers(parts: Iterable[_Part]) -> None:
    if any(part.verifier == "math" for part in parts) and (problem := missing_extra("math_verify", extra="eval")):
        raise UsageError(f"{problem}, or compare characters with --verifier exact")


def _generate(parts: Sequence[_Part], source: str, options: Options, view: EvaluateView) -> None:
    """Make the samples that are missing."""
    missing: list[list[int]] = []
    for part in parts:
        done = {row["problem_id"] for row in part.store.rows()}
        missing.append([i for i, problem in enumerate(part.benchmark.problems) if problem.problem_id not in done])
    if any(missing):
        require(*_LIBRARIES, extra="eval")
        view.phase("loading PyTorch and the model")
        with quiet_libraries(view):
            engine = _engine(source, options)
            for part, numbers in zip(parts, missing, strict=True):
                if numbers:
                    engine.check([part.prompt(number) for number in numbers], part.sampling)
            view.begin(sum(map(len, missing)))
            for part, numbers in zip(parts, missing, strict=True):
                total = len(part.benchmark.problems)
                view.benchmark(part.benchmark.name, total - len(numbers), total)
                with closing(make_verifier(part.verifier, options.timeout_seconds)) as verifier:
                    try:
                        _sample(part, numbers, engine, verifier, options, view)
                    except KeyboardInterrupt:
                        view.note(f"stopped; the same command goes on, with what is done in {part.store.folder.parent}")
                        raise
    for part in parts:
        part.store.finish()


def _engine(source: str, options: Options) -> Engine:
    try:
        return make_engine(
            options.engine,
            source,
            chat_template=options.chat_template,
            batch_size=options.batch_size,
            dtype=options.dtype,
        )
    except OSError as error:
        raise UsageError(f"model {source!r} cannot be loaded: {one_line(error)[:300]}") from None


def _sample(
    part: _Part, numbers: Sequence[int], engine: Engine, verifier: Verifier, options: Options, view: EvaluateView
) -> None:
    """Generate and verify the samples of some problems, a few problems at a time, each of which is stored at once."""
    at_once = max(1, options.batch_size // part.sampling.samples)
    for start in range(0, len(numbers), at_once):
        chunk = numbers[start : start + at_once]
        completions = engine.generate([part.prompt(number) for number in chunk], part.sampling, chunk[0])
        rows: list[Row] = []
        for number, made in zip(chunk, completions, strict=True):
            problem = part.benchmark.problems[number]
            for sample, completion in enumerate(made):
                row = {
                    "problem_id": problem.problem_id,
                    "sample": sample,
                    "completion": completion.text,
                    "tokens": completion.num_tokens,
                    "finished": completion.is_finished,
                }
                rows.append(row | _verdict(verifier, completion.text, problem.answer))
        part.store.add(chunk[0], rows)
        _count(view, len(chunk), rows)


def _reverify(parts: Sequence[_Part], options: Options, view: EvaluateView) -> None:
    """Verify stored samples anew; a benchmark's verdicts are replaced once all of them are known."""
    _check_verifiers(parts)
    stored = [part.store.rows() for part in parts]
    view.begin(sum(len({row["problem_id"] for row in rows}) for rows in stored))
    for part, rows in zip(parts, stored, strict=True):
        answers = {problem.problem_id: problem.answer for problem in part.benchmark.problems}
        by_problem: dict[str, list[Row]] = {}
        for row in rows:
            by_problem.setdefault(row["problem_id"], []).append(row)
        view.benchmark(part.benchmark.name, 0, len(by_problem))
        with closing(make_verifier(part.verifier, options.timeout_seconds)) as verifier:
            for problem_id, samples in by_problem.items():
                for row in samples:
                    row |= _verdict(verifier, row["completion"], answers[problem_id])
                _count(view, 1, samples)
        part.store.replace(rows, verifier=part.verifier)


def _verdict(verifier: Verifier, completion: str, answer: str) -> Row:
    found = verifier.verify(completion, answer)
    return {"extracted": found.extracted, "verdict": found.verdict, "reason": found.reason}


def _count(view: EvaluateView, problems: int, rows: Sequence[Row]) -> None:
    verdicts = Counter(row["verdict"] for row in rows)
    view.advance(problems, len(rows), verdicts[RIGHT], verdicts[UNSCORED])


def _summary(
    model: str, parts: Sequence[_Part], options: Options, reference: Mapping[str, Any] | None
) -> dict[str, Any]:
    rows = [part.store.rows() for part in parts]
    ks = _ks(options, min(part.sampling.samples for part in parts))
    results = {
        part.benchmark.name: benchmark_results(
            found,
            ks,
            len(part.benchmark.problems),
            {problem.problem_id: problem.level for problem in part.benchmark.problems},
        )
        | {"samples_per_problem": part.sampling.samples}
        for part, found in zip(parts, rows, strict=True)
    }
    summary: dict[str, Any] = {
        "model": without_secrets(model),
        "interval": "95% percentile bootstrap over problems, 10,000 resamples",
        "benchmarks": results,
        "mean": mean_results(rows, ks),
        "settings": {part.benchmark.name: part.store.settings() for part in parts},
        "versions": versions(),
    }
    if reference is not None:
        others = reference["benchmarks"]
        shared = {name: aes_results(found, others[name]) for name, found in results.items() if name in others}
        summary["aes"] = {
            "reference": reference["model"],
            "benchmarks": shared,
            "mean": aes_results(summary["mean"], reference["mean"]) if set(others) == set(results) else None,
        }
    return summary


def _read_reference(path: Path) -> dict[str, Any]:
    file = path / SUMMARY if path.is_dir() else path
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found["model"], found["benchmarks"], found["mean"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"reference {str(path)!r} is no evaluation: give a folder that rollwise evaluate wrote a {SUMMARY} to"
        ) from None
    return found
