"""Make the small arithmetic model: supervised warm-up from random weights, about a minute on a CPU.

Reinforcement learning needs a model that succeeds now and then, neither always nor never. The warm-up makes one
whose success rate runs from almost 1 on short problems to 0 on hard ones, by two means:

- It stops early, once the sampled accuracy has reached a target. Sorting and running sums are understood by then;
  addition has hardly begun.
- It teaches doubt. The target of an answer digit is smoothed over the ten digits, the more so the longer the answer
  (`digit_doubt`). The model learns how a problem is solved, yet sampled at temperature 1 it slips more often the more
  digits it has to write, much as if it had imitated careless demonstrations.

Reinforcement learning then takes the slips out within tens of steps. It makes little of addition: skill that is
missing altogether takes far longer, and the prompts that need it are the hopeless ones of the data set.
"""

from __future__ import annotations

import json
import math
import platform
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch.nn import functional as F

from rollwise._version import __version__
from rollwise.errors import ConfigError
from rollwise.tasks.arithmetic import (
    MAX_COMPLETION_TOKENS,
    Problem,
    build_tokenizer,
    exact_match_reward,
    generate_problems,
    held_out_problems,
)
from rollwise.tasks.saving import sampling_settings, save_model

__all__ = ["WARMUP_LEVELS", "accuracy_by_level", "build_model", "digit_doubt", "pretrain", "sample_rewards"]

WARMUP_LEVELS: tuple[str, ...] = (
    *(f"sort-{k}" for k in range(2, 9)),
    *(f"running_sum-{k}" for k in range(2, 9)),
    *(f"add-{k}" for k in range(1, 6)),
)
"""Levels of the warm-up; the shortest ones are in it because they make the longer ones quicker to learn."""

BATCH_SIZE = 256
PEAK_LEARNING_RATE = 3e-3
RISE_STEPS = 30
EVAL_EVERY = 25
SCHEDULE_STEPS = 800
"""Length of the learning rate's cosine, whatever `steps` is: stopping earlier does not change what came before."""

_DOUBT_BY_NUM_DIGITS = {4: 0.03, 5: 0.10, 6: 0.20, 7: 0.32, 8: 0.45}
_VALIDATION_SEED = 11


def digit_doubt(num_digits: int) -> float:
    """Return the probability mass `q` that the target of each answer digit spreads evenly over the ten digits.

    0 up to three digits, then 0.03, 0.10, 0.20, 0.32 and 0.45 at eight. A model that has learnt these targets
    perfectly answers right with probability `(1 - 0.9 q) ** num_digits`: 0.90 at four digits, 0.62 at five, 0.30 at
    six, 0.09 at seven and 0.02 at eight.

    Args:
        num_digits: Digits of the right answer.
    """
    return _DOUBT_BY_NUM_DIGITS.get(num_digits, 0.0)


def build_model(seed: int = 0) -> Any:
    """Build the untrained model: `LlamaForCausalLM`, 2 layers, width 64, 4 heads, tied embeddings, fp32.

    Args:
        seed: Seed of the random weights. The global generator of torch is left as it was.
    """
    tokenizer = build_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config)


def sample_rewards(
    model: Any, problems: Sequence[Problem], *, num_samples: int = 4, temperature: float = 1.0, seed: int = 0
) -> list[list[float]]:
    """Let the model answer each problem `num_samples` times.

    Args:
        model: A causal language model with the vocabulary of `build_tokenizer`.
        problems: Problems to solve, at least one.
        num_samples: Completions per problem.
        temperature: Of sampling; 0 takes the likeliest token.
        seed: Seed of the sampling. The global generator of torch is left as it was.

    Returns:
        `rewards_PG`: one row per problem, one reward per completion, 1.0 or 0.0.
    """
    tokenizer = build_tokenizer()
    inputs = tokenizer([p.prompt for p in problems], padding=True, return_tensors="pt")
    likeliest = {"top_k": 1}  # sampled from one token, which spares transformers' warning on unused settings
    chosen = {"temperature": temperature} if temperature else likeliest
    config = transformers.GenerationConfig(
        **sampling_settings(tokenizer) | chosen, max_new_tokens=MAX_COMPLETION_TOKENS
    )
    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sequences = model.generate(
            input_ids=inputs["input_ids"].repeat_interleave(num_samples, 0).to(model.device),
            attention_mask=inputs["attention_mask"].repeat_interleave(num_samples, 0).to(model.device),
            generation_config=config,
        )
    model.train(was_training)
    completions = tokenizer.batch_decode(sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = exact_match_reward(completions, [p.answer for p in problems for _ in range(num_samples)])
    return [rewards[start : start + num_samples] for start in range(0, len(rewards), num_samples)]


def accuracy_by_level(
    model: Any, problems: Sequence[Problem], *, num_samples: int = 4, temperature: float = 1.0, seed: int = 0
) -> dict[str, float]:
    """Measure avg@k, the mean reward of k = `num_samples` completions per problem, by level.

    Arguments as for `sample_rewards`.

    Returns:
        Mean reward by level, within 0..1, sorted by the level's name.
    """
    rewards_PG = sample_rewards(model, problems, num_samples=num_samples, temperature=temperature, seed=seed)
    by_level: dict[str, list[float]] = defaultdict(list)
    for problem, rewards_G in zip(problems, rewards_PG, strict=True):
        by_level[problem.level].extend(rewards_G)
    return {level: _mean(rewards) for level, rewards in sorted(by_level.items())}


def pretrain(
    output_dir: str | Path,
    *,
    seed: int = 0,
    steps: int = SCHEDULE_STEPS,
    target_accuracy: float | None = 0.35,
    levels: Sequence[str] = WARMUP_LEVELS,
    num_threads: int | None = None,
    on_progress: Callable[[int, int, float, float | None], None] | None = None,
) -> Path:
    """Train the small model on the train side of the arithmetic problems and save it with its tokenizer.

    The loss is the mean cross-entropy of the answer's tokens and the end token against smoothed targets: for a digit
    `d` of an answer with doubt `q = digit_doubt(len(answer))`, `-(1 - q) log p(d) - q/10 sum_e log p(e)`.
    The same seed, number of threads, machine and library versions give the same weights.

    Args:
        output_dir: Folder to write; made if it is not there, its files of the same names are replaced.
        seed: Seed of the weights, the problems and the sampling.
        steps: Optimizer steps of 256 problems at most, 1 to 800.
        target_accuracy: Stop once avg@4 at temperature 1 on 256 problems of the train side is as high, looking every
            25 steps; None trains for all `steps`. Skills emerge abruptly and not at the same step for every seed, so
            that an accuracy gives more equal models than a number of steps.
        levels: Levels to train on; see `generate_problems`. The accuracy is always that on `DEFAULT_LEVELS`.
        num_threads: Threads of torch during the warm-up; None leaves them as they are. They are put back afterwards.
        on_progress: Called after each step as `on_progress(step, steps, loss, accuracy)`. `accuracy` is None where it
            was not measured. The last call may come before `step` has reached `steps`.

    Returns:
        The folder: `config.json`, `generation_config.json`, `model.safetensors`, the tokenizer's files, and
        `pretrain.json` with the settings, the held-out accuracy by level (avg@4 at temperature 1) and the versions.

    Raises:
        ConfigError: An argument is out of its range.
    """
    if not 1 <= steps <= SCHEDULE_STEPS:
        raise ConfigError(f"steps is {steps}; it must be within 1..{SCHEDULE_STEPS}")
    if target_accuracy is not None and not 0 < target_accuracy <= 1:
        raise ConfigError(f"target_accuracy is {target_accuracy}; it must be above 0 and at most 1, or None")
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"num_threads is {num_threads}; it must be 1 or more, or None")
    validation = generate_problems(256, seed=_VALIDATION_SEED, split="train")
    with threads(num_threads):
        model = build_model(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.01, betas=(0.9, 0.98))
        batches = _batches(levels, seed)
        for step in range(1, steps + 1):
            model.train()
            optimizer.param_groups[0]["lr"] = _learning_rate(step)
            loss = _smoothed_loss(model, *next(batches))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            accuracy = None
            if step == steps or step % EVAL_EVERY == 0:
                accuracy = _mean(accuracy_by_level(model, validation, seed=seed).values())
            if on_progress is not None:
                on_progress(step, steps, loss.item(), accuracy)
            if accuracy is not None and target_accuracy is not None and accuracy >= target_accuracy:
                break
        held_out = accuracy_by_level(model, held_out_problems(), seed=seed)
        record = {
            "seed": seed,
            "steps": step,
            "target_accuracy": target_accuracy,
            "levels": list(levels),
            "batch_size": BATCH_SIZE,
            "num_threads": torch.get_num_threads(),
            "held_out_accuracy": _mean(held_out.values()),
            "held_out_accuracy_by_level": held_out,
            "versions": {
                "rollwise": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "tokenizers": tokenizers.__version__,
            },
        }
    return _save(model, Path(output_dir), record)


def _learning_rate(step: int) -> float:
    """Rise linearly for 30 steps, then fall along a cosine to a tenth of the peak at step 800; steps count from 1."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / SCHEDULE_STEPS))
    return PEAK_LEARNING_RATE * min(1.0, step / RISE_STEPS) * (0.1 + 0.9 * cosine)


def _batches(levels: Sequence[str], seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield `(tokens_BT, is_answer_BT, doubt_BT)`: padded on the right; answer marks the tokens to be predicted."""
    tokenizer = build_tokenizer()
    seeds = random.Random(seed)
    while True:
        problems = generate_problems(BATCH_SIZE, seed=seeds.getrandbits(63), levels=levels, split="train")
        prompts = tokenizer([p.prompt for p in problems])["input_ids"]
        answers = tokenizer([p.answer for p in problems], add_special_tokens=False)["input_ids"]
        length = max(len(prompt) + len(answer) + 1 for prompt, answer in zip(prompts, answers, strict=True))
        tokens_BT = torch.full((len(problems), length), tokenizer.pad_token_id)
        is_answer_BT = torch.zeros(len(problems), length, dtype=torch.bool)
        doubt_BT = torch.zeros(len(problems), length)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            start, end = len(prompt), len(prompt) + len(answer)
            tokens_BT[row, : end + 1] = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
            is_answer_BT[row, start : end + 1] = True
            doubt_BT[row, start:end] = digit_doubt(len(answer))
        yield tokens_BT, is_answer_BT, doubt_BT


def _smoothed_loss(
    model: Any, tokens_BT: torch.Tensor, is_answer_BT: torch.Tensor, doubt_BT: torch.Tensor
) -> torch.Tensor:
    """Return the mean cross-entropy over the answer tokens; see `pretrain` for the formula."""
    chosen = is_answer_BT[:, 1:]
    logits = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1][chosen]
    log_probs = F.log_softmax(logits.float(), dim=-1)
    doubt = doubt_BT[:, 1:][chosen]
    right = log_probs.gather(1, tokens_BT[:, 1:][chosen].unsqueeze(1)).squeeze(1)
    digits = build_tokenizer().convert_tokens_to_ids(list("0123456789"))
    return -((1 - doubt) * right + doubt * log_probs[:, digits].mean(dim=1)).mean()


@contextmanager
def threads(num_threads: int | None) -> Iterator[None]:
    """Use `num_threads` threads of torch inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)


def _save(model: Any, folder: Path, record: dict[str, Any]) -> Path:
    """Write model, tokenizer and `pretrain.json`."""
    save_model(model, build_tokenizer(), folder, max_new_tokens=MAX_COMPLETION_TOKENS)
    (folder / "pretrain.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return folder
