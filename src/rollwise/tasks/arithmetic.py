"""Arithmetic problems of graded difficulty, their tokenizer, their reward and a small pretrained model.

Three tasks, each with one level per number of digits `k`:

==============  =======================================================  ==========  ======
task            the answer                                               prompt      answer
==============  =======================================================  ==========  ======
`sort`          the `k` digits in ascending order                        `S5302=`    `0235`
`running_sum`   digit `i` is the sum of the first `i` digits modulo 10   `M7485=`    `7194`
`add`           the sum of two `k`-digit numbers, last digit first       `48+76=`    `421`
==============  =======================================================  ==========  ======

A level is written `<task>-<digits>`, for example `sort-5`. Answers are checked by string equality, so the reward is
1 or 0 and can be computed anywhere. Addition is answered last digit first because that is the order in which carries
are known; a small model learns it in minutes.

Every prompt belongs, by a hash of its text, either to the *train* or to the *test* side (see `is_held_out`). The sides
are therefore disjoint for every seed, size and choice of levels, and the warm-up of the shipped model has never seen a
test prompt either.

Importing this module needs the standard library alone; `datasets`, `tokenizers` and `transformers` are imported by the
functions that return their objects.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from rollwise.errors import ConfigError

__all__ = [
    "DEFAULT_LEVELS",
    "MAX_COMPLETION_TOKENS",
    "TASKS",
    "Problem",
    "build_tokenizer",
    "exact_match_reward",
    "generate_problems",
    "held_out_problems",
    "is_held_out",
    "load_dataset",
    "model_path",
    "num_prompts",
    "parse_level",
]

TASKS: tuple[str, ...] = ("sort", "running_sum", "add")
"""The names of the tasks; the table above says what each one asks."""

MAX_DIGITS = 8
"""The largest `k` of a level: the model's positions and `MAX_COMPLETION_TOKENS` are made for it."""

DEFAULT_LEVELS: tuple[str, ...] = (
    *(f"sort-{k}" for k in range(3, 9)),
    *(f"running_sum-{k}" for k in range(3, 9)),
    *(f"add-{k}" for k in range(2, 6)),
)
"""The levels of `load_dataset`: 16, from solved to hopeless for the shipped model."""

MAX_COMPLETION_TOKENS = MAX_DIGITS + 2
"""Tokens of the longest answer, with the end-of-sequence token: use it as `max_completion_length`."""

CHARACTERS = "0123456789+-*/%=<>(),.:? SMR"
"""The alphabet: with four special tokens it makes a vocabulary of 32; most signs wait for tasks of your own."""

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, UNKNOWN_TOKEN = "<pad>", "<s>", "</s>", "<unk>"

_HELD_OUT_ONE_IN = 8
_TEST_SEED = 20_240_607


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem and its only right answer.

    Attributes:
        prompt: What the model reads, for example `"S5302="`.
        answer: What it should write before the end-of-sequence token, for example `"0235"`.
        task: One of `TASKS`.
        level: `<task>-<digits>`, for example `"sort-4"`.
    """

    prompt: str
    answer: str
    task: str
    level: str


def parse_level(level: str) -> tuple[str, int]:
    """Split a level such as `"sort-4"` into its task and its number of digits, `("sort", 4)`.

    Raises:
        ConfigError: The task is unknown or the number of digits is not within 1..8.
    """
    match = re.fullmatch(r"([a-z_]+)-([0-9]+)", level)
    if match is None or match[1] not in TASKS or not 1 <= int(match[2]) <= MAX_DIGITS:
        raise ConfigError(
            f"unknown level {level!r}: write <task>-<digits> with a task of {', '.join(TASKS)} and "
            f"1 to {MAX_DIGITS} digits, for example 'sort-4'"
        )
    return match[1], int(match[2])


def num_prompts(level: str) -> int:
    """Count the different prompts of a level, both sides together.

    `10^k` for `sort` and `running_sum`; for `add`, the square of the number of `k`-digit numbers: `(9 * 10^(k-1))^2`,
    and 100 for `k` = 1.

    Raises:
        ConfigError: Not a level.
    """
    task, digits = parse_level(level)
    return _num_operands(digits) ** 2 if task == "add" else 10**digits


def is_held_out(prompt: str) -> bool:
    """Tell whether a prompt belongs to the test side: one in eight does, by a hash of its text.

    The hash is BLAKE2 and depends on nothing but the text, so a prompt is on the same side on every machine.
    """
    return hashlib.blake2s(prompt.encode(), digest_size=4).digest()[0] % _HELD_OUT_ONE_IN == 0


def generate_problems(
    num_problems: int,
    *,
    seed: int,
    levels: Sequence[str] = DEFAULT_LEVELS,
    exclude: Collection[str] = (),
    split: Literal["train", "test"] | None = None,
) -> list[Problem]:
    """Draw different problems at random, equally many of each level.

    Args:
        num_problems: How many. Where it is not a multiple of the number of levels, the first levels get one more.
        seed: Same seed (and arguments), same problems in the same order.
        levels: Levels to draw from. A level that is named twice gets twice the problems.
        exclude: Prompts that must not be drawn.
        split: Draw only from the train or only from the test side; None draws from both.

    Returns:
        Problems in random order, no prompt twice.

    Raises:
        ConfigError: A level has fewer prompts than are asked for; or an argument is out of its range.
    """
    if num_problems < 0:
        raise ConfigError(f"num_problems is {num_problems}; it must be 0 or more")
    if not levels:
        raise ConfigError("levels is empty; name at least one, for example ['sort-4']")
    if split not in (None, "train", "test"):
        raise ConfigError(f"split is {split!r}; it must be 'train', 'test' or None for both")
    wanted: dict[str, int] = {}
    for position, level in enumerate(levels):
        share = num_problems // len(levels) + (position < num_problems % len(levels))
        wanted[level] = wanted.get(level, 0) + share
    excluded = frozenset(exclude)
    rng = random.Random(seed)
    problems: list[Problem] = []
    for level, num_wanted in wanted.items():
        found: list[Problem] = []
        for index in _random_order(num_prompts(level), num_wanted, rng):
            if len(found) == num_wanted:
                break
            problem = _problem(level, index)
            if problem.prompt not in excluded and (split is None or is_held_out(problem.prompt) == (split == "test")):
                found.append(problem)
        if len(found) < num_wanted:
            side = f" on the {split} side" if split else ""
            raise ConfigError(
                f"level {level!r} is exhausted: {num_wanted} problems wanted, {len(found)} prompts are left{side} "
                f"({num_prompts(level)} in all, {len(excluded)} excluded); ask for fewer problems, use more levels "
                f"or levels with more digits"
            )
        problems += found
    rng.shuffle(problems)
    return problems


def held_out_problems(num_test: int = 256, levels: Sequence[str] = DEFAULT_LEVELS) -> list[Problem]:
    """Return the test problems, the same ones on every call: equally many of each level, none seen in the warm-up.

    Raises:
        ConfigError: As `generate_problems`.
    """
    return generate_problems(num_test, seed=_TEST_SEED, levels=levels, split="test")


def load_dataset(
    num_train: int = 8_000,
    num_test: int = 256,
    seed: int = 0,
    levels: Sequence[str] = DEFAULT_LEVELS,
    test_levels: Sequence[str] | None = None,
) -> Any:
    """Make the data set for a training run.

    Args:
        num_train: Size of the `train` split.
        num_test: Size of the `test` split, the held-out problems.
        seed: Changes the train split only, so that runs with different seeds are measured on the same problems.
        levels: Levels of both splits; see `generate_problems`.
        test_levels: Levels of the test split, if other than those.

    Returns:
        A `datasets.DatasetDict` with the splits `train` and `test` (no prompt in common) and the columns `prompt`,
        `answer`, `task` and `level`, all of them strings. TRL hands the last three to the reward function.

    Raises:
        ConfigError: As `generate_problems`.
    """
    import datasets

    splits = {
        "train": generate_problems(num_train, seed=seed, levels=levels, split="train"),
        "test": held_out_problems(num_test, levels if test_levels is None else test_levels),
    }
    columns = ("prompt", "answer", "task", "level")
    return datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict({c: [getattr(p, c) for p in problems] for c in columns})
            for name, problems in splits.items()
        }
    )


def exact_match_reward(completions: Sequence[str], answer: Sequence[str], **kwargs: object) -> list[float]:
    """Reward 1.0 for a completion that is the answer and nothing else, else 0.0 (TRL's signature of a reward).

    Args:
        completions: Generated texts without special tokens, one per rollout.
        answer: The right answers, one per rollout (TRL repeats the data set's column for every rollout of a group).
        kwargs: Everything else that TRL hands over; not used.

    Returns:
        One reward per rollout.

    Raises:
        ConfigError: The two lists differ in length.
    """
    if len(completions) != len(answer):
        raise ConfigError(f"{len(completions)} completions but {len(answer)} answers; there must be one answer each")
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def build_tokenizer() -> Any:
    """Build the character tokenizer: 32 tokens, padding on the left, `<s>` in front of every text.

    Called on a plain string, as TRL does with prompts, it gives `<s>` and one token per character, which is what the
    shipped model was trained on. A completion ends with `</s>`. Characters outside `CHARACTERS` become `<unk>`, which
    decoding with `skip_special_tokens=True` drops: `"S5x="` comes back as `"S5="`.

    Returns:
        A `transformers.PreTrainedTokenizerFast`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {t: i for i, t in enumerate((PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, UNKNOWN_TOKEN, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A", special_tokens=[(BOS_TOKEN, vocabulary[BOS_TOKEN])]
    )
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        padding_side="left",
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def model_path() -> Path:
    """Return the folder of the shipped model, for `from_pretrained` and for TRL's `model=str(model_path())`.

    It holds the model (133,000 parameters, fp32), its tokenizer and `pretrain.json`, which says how it was made.

    Raises:
        ConfigError: The package was installed without its data or runs from inside an archive.
    """
    path = Path(str(resources.files("rollwise.tasks") / "assets" / "arithmetic"))
    if not (path / "model.safetensors").is_file():
        raise ConfigError(
            f"no model.safetensors in {path}: reinstall rollwise from a wheel, or make the model with "
            f"`rollwise pretrain OUTPUT_DIR` and pass that folder instead"
        )
    return path


def _num_operands(digits: int) -> int:
    """Count the numbers of `digits` digits; 0 counts as a one-digit number."""
    return 10 if digits == 1 else 9 * 10 ** (digits - 1)


def _problem(level: str, index: int) -> Problem:
    """Return problem `index` of a level; different indices below `num_prompts(level)` have different prompts."""
    task, k = parse_level(level)
    if task == "add":
        smallest = 0 if k == 1 else 10 ** (k - 1)
        first, second = (smallest + i for i in divmod(index, _num_operands(k)))
        return Problem(f"{first}+{second}=", str(first + second)[::-1], task, level)
    digits = f"{index:0{k}d}"
    if task == "sort":
        return Problem(f"S{digits}=", "".join(sorted(digits)), task, level)
    total, sums = 0, ""
    for digit in digits:
        total = (total + int(digit)) % 10
        sums += str(total)
    return Problem(f"M{digits}=", sums, task, level)


def _random_order(size: int, num_expected: int, rng: random.Random) -> Iterator[int]:
    """Yield every index below `size` once, in random order, without listing a large space of which little is used."""
    if size <= 4 * num_expected:
        yield from rng.sample(range(size), size)
        return
    seen: set[int] = set()
    while len(seen) < size:
        index = rng.randrange(size)
        if index not in seen:
            seen.add(index)
            yield index
