"""Warm-up of the embedded agents: they imitate demonstrations of an expert that errs now and then.

GRPO needs an agent that succeeds sometimes. A random one almost never reaches a goal many steps away; one that has
imitated noisy demonstrations does so now and then, and reinforcement learning takes the noise out again.

    loss = -mean over the answers' tokens of log p(token | all before it)

where a demonstration's answer is the expert's action, or with probability `noise` any action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollwise.errors import ConfigError
from rollwise.tasks.conversation import Piece, TurnEncoder, join
from rollwise.tasks.environment import LanguageEnvironment, Observation
from rollwise.tasks.experts import best_action
from rollwise.tasks.levels import first_prompt

__all__ = ["Demonstration", "demonstrate", "imitate"]

_MOVES = ("left", "down", "right", "up")


@dataclass(frozen=True)
class Demonstration:
    """One episode of an expert.

    Attributes:
        piece: Its tokens and pictures.
        is_answer: Which tokens are answers.
        reward: Its reward; None if it is unscored.
    """

    piece: Piece
    is_answer: list[bool]
    reward: float | None


def demonstrate(
    environment: LanguageEnvironment,
    specs: Sequence[Any],
    encoder: TurnEncoder,
    *,
    noise: float,
    seed: int,
    actions: Sequence[str] = _MOVES,
) -> list[Demonstration]:
    """Play one episode per level as an expert that errs.

    Args:
        environment: One that `rollwise.tasks.experts` knows.
        specs: The levels.
        encoder: Makes tokens of prompts and observations.
        noise: Probability of any action in place of the expert's, at each turn.
        seed: Seed of noise, of choices among equally good actions and of the episodes' chance.
        actions: Actions that noise draws from.

    Raises:
        ConfigError: `noise` is not within 0..1, or there is no expert.
    """
    if not 0 <= noise <= 1:
        raise ConfigError(f"noise is {noise}; it must be within 0..1")
    rng = np.random.default_rng(seed)
    found = []
    for spec in specs:
        observation = environment.begin(spec, int(rng.integers(2**31)))
        found.append(_play(environment, observation, encoder, noise, rng, actions))
    return found


def _play(
    environment: LanguageEnvironment,
    observation: Observation,
    encoder: TurnEncoder,
    noise: float,
    rng: np.random.Generator,
    actions: Sequence[str],
) -> Demonstration:
    pieces = [encoder.prompt(first_prompt(environment, observation), observation)]
    is_answer = [False] * len(pieces[0].ids)
    rewards: list[float | None] = []
    while True:
        action = best_action(environment, rng)
        if rng.random() < noise:
            action = actions[int(rng.integers(len(actions)))]
        pieces.append(encoder.answer(action))
        is_answer += [True] * len(pieces[-1].ids)
        turn = environment.take_turn(action)
        rewards.append(turn.reward)
        if turn.done:
            break
        pieces.append(encoder.turn(turn.observation, is_conversational=True))
        is_answer += [False] * len(pieces[-1].ids)
    reward = None if None in rewards else float(sum(r for r in rewards if r is not None))
    return Demonstration(join(pieces), is_answer, reward)


def imitate(
    model: Any,
    demonstrations: Sequence[Demonstration],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Train a model on demonstrations, with AdamW, a linear rise over 5% of the steps and then a cosine to a tenth.

    Args:
        model: A causal language model, with or without vision; changed in place.
        demonstrations: At least one.
        steps: Optimizer steps.
        batch_size: Demonstrations per step.
        learning_rate: The peak.
        seed: Seed of the order.
        on_step: Called as `on_step(step, loss)` after each step, from 1 on.
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    rise = max(1, steps // 20)

    def factor(step: int) -> float:
        cosine = 0.5 * (1 + float(np.cos(np.pi * step / steps)))
        return min(1.0, (step + 1) / rise) * (0.1 + 0.9 * cosine)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    rng = np.random.default_rng(seed)
    order: list[int] = []
    model.train()
    for step in range(1, steps + 1):
        while len(order) < batch_size:
            order += rng.permutation(len(demonstrations)).tolist()
        chosen, order = [demonstrations[i] for i in order[:batch_size]], order[batch_size:]
        inputs, labels = _batch(chosen)
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step, loss.item())


def _batch(chosen: Sequence[Demonstration]) -> tuple[dict[str, Any], Any]:
    import torch

    length = max(len(demonstration.piece.ids) for demonstration in chosen)
    ids_BT = torch.zeros(len(chosen), length, dtype=torch.long)  # whatever stands where nothing attends to it
    mask_BT = torch.zeros(len(chosen), length, dtype=torch.long)
    labels_BT = torch.full((len(chosen), length), -100)
    together = join([demonstration.piece for demonstration in chosen])
    inputs: dict[str, Any] = {"input_ids": ids_BT, "attention_mask": mask_BT, **together.tensors}
    for name in together.types:
        inputs[name] = torch.zeros(len(chosen), length, dtype=torch.long)
    for row, demonstration in enumerate(chosen):
        ids = torch.tensor(demonstration.piece.ids)
        ids_BT[row, : len(ids)] = ids
        mask_BT[row, : len(ids)] = 1
        is_answer = torch.tensor(demonstration.is_answer)
        labels_BT[row, : len(ids)] = torch.where(is_answer, ids, -100)
        for name in together.types:
            inputs[name][row, : len(ids)] = torch.tensor(demonstration.piece.types[name])
    return inputs, labels_BT
