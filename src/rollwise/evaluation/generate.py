"""Samples of a model: by transformers anywhere, by vLLM where it is installed.

torch, transformers and vLLM are imported when an engine is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from rollwise.errors import ConfigError

ENGINES = ("auto", "transformers", "vllm")


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    Attributes:
        samples: Completions of each problem.
        temperature: 0 takes the most likely token each time; then `samples` must be 1.
        top_p: Sample from the smallest set of tokens with this probability; 1: from all. Top-k is off.
        max_tokens: Tokens of a completion, at most, with the end-of-sequence token.
        seed: Seed of the sampling.

    Raises:
        ConfigError: A value is out of its bounds.
    """

    samples: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"samples is {self.samples}, but must be at least 1 per problem")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}, but must be at least 1")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature is {self.temperature}, but must be at least 0; 1 samples from the policy")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}, but must be above 0 and at most 1")
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError(
                f"temperature 0 gives {self.samples} equal samples: take 1 sample, or a temperature above 0"
            )


@dataclass(frozen=True)
class Completion:
    """One generated text.

    Attributes:
        text: Without special tokens.
        num_tokens: Generated tokens, with the end-of-sequence token.
        is_finished: It ended by itself, within `max_tokens`.
    """

    text: str
    num_tokens: int
    is_finished: bool


class Engine(Protocol):
    """What generates completions."""

    name: str

    def check(self, prompts: Sequence[str], sampling: Sampling) -> None:
        """Raise a `ConfigError` where a prompt and its completion would not fit into the model's positions."""
        ...

    def generate(self, prompts: Sequence[str], sampling: Sampling, chunk: int) -> list[list[Completion]]:
        """Return `sampling.samples` completions of each prompt.

        Args:
            prompts: Texts, or what a user says where the model is asked through its chat template.
            sampling: How.
            chunk: The same prompts, sampling and chunk give the same completions on the same machine.
        """
        ...


def make_engine(
    name: str, model: str, *, chat_template: bool = True, batch_size: int = 32, dtype: str = "auto"
) -> Engine:
    """Return an engine.

    Args:
        name: `transformers`, `vllm`, or `auto`: vLLM if it is installed and there is a GPU.
        model: What `from_pretrained` takes.
        chat_template: Ask through the tokenizer's chat template, where it has one.
        batch_size: Sequences that transformers generates at a time.
        dtype: Of the weights; `auto` as they were saved.

    Raises:
        ConfigError: No such engine, or it is not installed.
    """
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}: choose from {', '.join(ENGINES)}")
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}, but must be at least 1")
    if name == "auto":
        name = "vllm" if find_spec("vllm") is not None and _has_gpu() else "transformers"
    if name == "vllm":
        if find_spec("vllm") is None:
            raise ConfigError("engine vllm is not installed: pip install vllm, or take the engine transformers")
        return VllmEngine(model, chat_template=chat_template, dtype=dtype)
    return TransformersEngine(model, chat_template=chat_template, batch_size=batch_size, dtype=dtype)


class TransformersEngine:
    """Batched sampling with `transformers`, on the GPU where there is one.

    Args:
        model: What `from_pretrained` takes.
        chat_template: Ask through the tokenizer's chat template, where it has one.
        batch_size: Sequences at a time.
        dtype: Of the weights; `auto` as they were saved.
    """

    name = "transformers"

    def __init__(self, model: str, *, chat_template: bool = True, batch_size: int = 32, dtype: str = "auto") -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(self._device).eval()
        self._chat_template, self._batch_size = chat_template, batch_size

    def check(self, prompts: Sequence[str], sampling: Sampling) -> None:
        """Compare the longest prompt and `sampling.max_tokens` with the model's `max_position_embeddings`."""
        most = getattr(self._model.config, "max_position_embeddings", None)
        longest = max(map(len, encode(self._tokenizer, prompts, chat_template=self._chat_template)))
        if isinstance(most, int) and longest + sampling.max_tokens > most:
            raise ConfigError(
                f"the longest prompt has {longest} tokens and max_tokens is {sampling.max_tokens}, together more than "
                f"the model's {most} positions: "
                + (f"lower it to {most - longest} with --max-tokens" if longest < most else "leave out such prompts")
            )

    def generate(self, prompts: Sequence[str], sampling: Sampling, chunk: int) -> list[list[Completion]]:
        """Return completions; the random numbers depend on `sampling.seed` and `chunk` alone."""
        import torch

        encoded = encode(self._tokenizer, prompts, chat_template=self._chat_template)
        torch.manual_seed(_mixed(sampling.seed, chunk))
        rows = [ids for ids in encoded for _ in range(sampling.samples)]
        made: list[Completion] = []
        for start in range(0, len(rows), self._batch_size):
            made += self._batch(rows[start : start + self._batch_size], sampling)
        return [made[i : i + sampling.samples] for i in range(0, len(made), sampling.samples)]

    def _batch(self, rows: Sequence[list[int]], sampling: Sampling) -> list[Completion]:
        import torch

        width = max(map(len, rows))
        padding = self._tokenizer.pad_token_id
        ids = torch.tensor([[padding] * (width - len(row)) + row for row in rows], device=self._device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self._device)
        is_random = sampling.temperature > 0
        options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if is_random else {}
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=is_random,
                max_new_tokens=sampling.max_tokens,
                pad_token_id=padding,
                **options,
            )
        return [self._completion(row) for row in output[:, width:].tolist()]

    def _completion(self, ids: list[int]) -> Completion:
        ends = self._ends()
        length = next((i + 1 for i, token in enumerate(ids) if token in ends), None)
        kept = ids[:length]
        return Completion(self._tokenizer.decode(kept, skip_special_tokens=True), len(kept), length is not None)

    def _ends(self) -> set[int]:
        """Return the tokens that end a sequence."""
        configured = self._model.generation_config.eos_token_id
        ends = configured if isinstance(configured, list) else [configured]
        return {token for token in (*ends, self._tokenizer.eos_token_id) if token is not None}


class VllmEngine:
    """Sampling with vLLM; the batch is vLLM's own.

    Args:
        model: What `vllm.LLM` takes.
        chat_template: Ask through the tokenizer's chat template, where it has one.
        dtype: Of the weights; `auto` as they were saved.
    """

    name = "vllm"

    def __init__(self, model: str, *, chat_template: bool = True, dtype: str = "auto") -> None:
        from vllm import LLM

        self._model = LLM(model=model, dtype=dtype)
        self._chat_template = chat_template

    def check(self, prompts: Sequence[str], sampling: Sampling) -> None:
        """Leave it to vLLM, which knows how long its sequences may be and refuses longer prompts."""

    def generate(self, prompts: Sequence[str], sampling: Sampling, chunk: int) -> list[list[Completion]]:
        """Return completions; each prompt has a seed of its own."""
        from vllm import SamplingParams

        encoded = encode(self._model.get_tokenizer(), prompts, chat_template=self._chat_template)
        params = [
            SamplingParams(
                n=sampling.samples,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                seed=_mixed(sampling.seed, chunk + i),
            )
            for i in range(len(encoded))
        ]
        outputs = self._model.generate([{"prompt_token_ids": ids} for ids in encoded], params, use_tqdm=False)
        return [
            [Completion(made.text, len(made.token_ids), made.finish_reason == "stop") for made in output.outputs]
            for output in outputs
        ]


def encode(tokenizer: Any, prompts: Sequence[str], *, chat_template: bool) -> list[list[int]]:
    """Return each prompt's tokens: as the tokenizer writes a text, or as a user's turn of its chat template."""
    if chat_template and getattr(tokenizer, "chat_template", None):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [tokenizer(prompt)["input_ids"] for prompt in prompts]


def _mixed(seed: int, chunk: int) -> int:
    """Return a seed of 31 bits that differs for each chunk."""
    return (seed * 1_000_003 + chunk * 7_919) % (2**31 - 1)


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())
