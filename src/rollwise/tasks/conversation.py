"""Episodes as token ids: the prompt, and what a chat template puts between an answer and the next one.

Token ids are only ever appended, never made anew from text, so that the policy is trained on what it has seen and
written. Imports nothing heavy: tokenizer or processor are given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollwise.errors import ConfigError
from rollwise.tasks.environment import Observation

__all__ = ["Piece", "TurnEncoder", "join"]

_MARK = "Q7XANSWERX7Q"
_MAX_CACHED = 4096

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Piece:
    """A stretch of tokens that the model is shown.

    Attributes:
        ids: Token ids.
        types: By name, one value per token that tells images from text (`mm_token_type_ids`).
        tensors: By name, what the processor makes of its images (`pixel_values`, `image_grid_thw`), along axis 0.
        images: The images, as PIL images.
    """

    ids: list[int]
    types: dict[str, list[int]] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()


def join(pieces: Sequence[Piece]) -> Piece:
    """One piece after the other; token types of a piece that has none are 0."""
    names = {name for piece in pieces for name in piece.types}
    tensors: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, tensor in piece.tensors.items():
            tensors.setdefault(name, []).append(tensor)
    if tensors:
        import torch

    return Piece(
        [token for piece in pieces for token in piece.ids],
        {name: [t for piece in pieces for t in piece.types.get(name, [0] * len(piece.ids))] for name in names},
        {name: torch.cat(parts) for name, parts in tensors.items()},
        tuple(image for piece in pieces for image in piece.images),
    )


class TurnEncoder:
    """Turns prompts and observations into token ids, with the model's own chat template.

    Args:
        processing_class: A tokenizer, or for pictures a processor.

    Raises:
        ConfigError: When used: it has no chat template and the prompts are messages, or one that cannot be continued.
    """

    def __init__(self, processing_class: Any) -> None:
        self._processor = processing_class
        self._tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self._takes_images = hasattr(processing_class, "image_processor")
        self._cache: OrderedDict[Any, Piece] = OrderedDict()

    def prompt(self, prompt: str | Messages, observation: Observation) -> Piece:
        """The start of an episode.

        Args:
            prompt: Messages, of which the last one gives way to the observation, or plain text that holds it.
            observation: The first observation.

        Raises:
            ConfigError: A plain prompt does not hold the observation, or the observation has pictures that plain
                prompts cannot have.
        """
        if isinstance(prompt, str):
            if observation.images:
                raise ConfigError("pictures need prompts of messages, and these are texts: set as_messages to True")
            if observation.text not in prompt:
                raise ConfigError(
                    f"the prompt {prompt[:80]!r}... does not show what its episode begins with, "
                    f"{observation.text[:80]!r}; make the data set with messages, which are made to fit"
                )
            return self._piece(prompt, (), add_special_tokens=True)
        key = ("prompt", repr(prompt[:-1]), *_key(observation))
        return self._cached(key, lambda: self._first(prompt, observation))

    def turn(self, observation: Observation, *, is_conversational: bool, answer_ended: bool = True) -> Piece:
        """What stands between an answer and the next one: the observation, and all that the template puts around it.

        Args:
            observation: What the environment showed.
            is_conversational: Whether the prompt was messages.
            answer_ended: Whether the answer ended with an end-of-sequence token, which then is not repeated here.
        """
        key = (is_conversational, answer_ended, *_key(observation))
        return self._cached(key, lambda: self._between(observation, is_conversational, answer_ended))

    def answer(self, text: str) -> Piece:
        """An answer and its end, as a model would write it."""
        return self._cached(("answer", text), lambda: self._piece(text + str(self._tokenizer.eos_token or ""), ()))

    def _first(self, prompt: Messages, observation: Observation) -> Piece:
        messages = [*map(self._message, prompt[:-1]), self._user(observation)]
        return self._piece(self._render(messages, generation=True), observation.images)

    def _between(self, observation: Observation, is_conversational: bool, answer_ended: bool) -> Piece:
        end = str(self._tokenizer.eos_token or "")
        if not is_conversational:
            return self._piece(("" if answer_ended else end) + f"{observation.text}\n", ())
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        text = self._render([*map(self._message, before), self._user(observation)], generation=True)
        _, found, text = text.rpartition(_MARK)
        if not found:
            raise ConfigError(
                "the chat template leaves out earlier answers, so that an episode cannot be continued; give the "
                "tokenizer a chat_template that renders assistant messages whole"
            )
        if answer_ended and end:
            text = text.removeprefix(end)
        elif end and not text.startswith(end):
            text = end + text
        return self._piece(text, observation.images)

    def _user(self, observation: Observation) -> dict[str, Any]:
        if not observation.images:
            return self._message({"role": "user", "content": observation.text})
        if not self._takes_images:
            raise ConfigError(
                f"observations have pictures, and {type(self._processor).__name__} takes none; give a vision-language "
                "model with its processor, or set picture to False"
            )
        content = [{"type": "image"} for _ in observation.images]
        text = [{"type": "text", "text": observation.text}] if observation.text else []
        return {"role": "user", "content": [*content, *text]}

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message of text in the form that the template takes: processors' templates want parts."""
        content = message["content"]
        if self._takes_images and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        return {**message, "content": content}

    def _render(self, messages: Sequence[Mapping[str, Any]], *, generation: bool) -> str:
        if getattr(self._processor, "chat_template", None) is None:
            raise ConfigError(
                "prompts are messages, and the tokenizer has no chat template; set its chat_template, or make the data "
                "set with as_messages=False"
            )
        return str(
            self._processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation)
        )

    def _piece(self, text: str, images: Sequence[np.ndarray], *, add_special_tokens: bool = False) -> Piece:
        if not images:
            ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
            return Piece(list(ids))
        from PIL import Image

        pictures = tuple(Image.fromarray(image) for image in images)
        encoded = self._processor(
            text=[text], images=list(pictures), add_special_tokens=add_special_tokens, return_tensors="pt"
        )
        ids = encoded["input_ids"][0].tolist()
        rest = {name: value for name, value in encoded.items() if name not in ("input_ids", "attention_mask")}
        types = {name: value[0].tolist() for name, value in rest.items() if name.endswith("token_type_ids")}
        return Piece(ids, types, {name: value for name, value in rest.items() if name not in types}, pictures)

    def _cached(self, key: Any, make: Any) -> Piece:
        """Levels repeat within a group and states within an episode; the oldest of many are forgotten."""
        if key not in self._cache:
            self._cache[key] = make()
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]


def _key(observation: Observation) -> tuple[Any, ...]:
    return observation.text, *((image.shape, image.tobytes()) for image in observation.images)
