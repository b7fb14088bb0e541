"""Warm-up of the embedded agents: they imitate demonstrations of an expert that errs now and then.

GRPO needs an agent that succeeds sometimes. A random one almost never reaches a goal many steps away; one that has
imitated noisy demonstrations does so now and then, and reinforcement learning takes the noise out again.

    loss = -mean over the answers' tokens of log p(token | all before it)

where a demonstration's answer is the expert's action, or with probability `noise` any action. What a move needs to know
stands in the newest observation, but an untrained model does not know that: where boards are large it is first shown
single turns with the answers that are right, and then whole episodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rollwise._version import __version__
from rollwise.errors import ConfigError
from rollwise.tasks import fictions
from rollwise.tasks.agents import build_processor, build_text_agent, build_tokenizer, build_vision_agent, save_agent
from rollwise.tasks.conversation import Piece, TurnEncoder, join
from rollwise.tasks.environment import LanguageEnvironment, Observation
from rollwise.tasks.experts import any_action, best_action
from rollwise.tasks.levels import draw_specs, first_prompt, is_held_out, make_environment

__all__ = ["AGENTS", "AgentSettings", "Demonstration", "demonstrate", "imitate", "make_agent"]


@dataclass(frozen=True)
class AgentSettings:
    """How an embedded agent is made.

    Attributes:
        environment: Name of the environment.
        settings: Its settings.
        levels: Names of levels that it is shown.
        picture: Whether it sees pictures.
        noise: See `demonstrate`.
        num_demonstrations: Episodes that it is shown, each of a level of its own.
        steps: Optimizer steps.
        turn_steps: How many of them, the first ones, see single turns with the expert's right answers in place
            of demonstrations.
        batch_size: Demonstrations per step.
        turn_batch_size: Single turns per step.
        learning_rate: The peak.
        hidden_size: Width.
        num_layers: Layers.
    """

    environment: str
    levels: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    picture: bool = False
    noise: float = 0.4
    num_demonstrations: int = 2_000
    steps: int = 300
    turn_steps: int = 0
    batch_size: int = 64
    turn_batch_size: int = 128
    learning_rate: float = 3e-3
    hidden_size: int = 64
    num_layers: int = 2


AGENTS: dict[str, AgentSettings] = {
    "frozen_lake": AgentSettings("frozen_lake", ("4x4",)),
    "frozen_lake_vision": AgentSettings(
        "frozen_lake", ("4x4",), {"show_text": False}, picture=True, num_demonstrations=800, batch_size=48
    ),
    "countdown": AgentSettings(
        "countdown",
        ("numbers-3", "numbers-4"),
        {"max_number": 12},
        noise=0.2,
        num_demonstrations=8_000,
        steps=1_500,
    ),
    "sokoban": AgentSettings(
        "sokoban",
        ("6x6-1",),
        {"max_turns": 10},
        num_demonstrations=4_000,
        steps=550,
        turn_steps=500,
        learning_rate=1e-3,
        num_layers=3,
    ),
    "search_qa": AgentSettings("search_qa", (), {"num_passages": 1}, noise=0.2, batch_size=48, steps=1_500),
}
"""The embedded agents, by name."""


@dataclass(frozen=True)
class Demonstration:
    """One episode of an expert.

    Attributes:
        turns: For each turn what was shown and what was answered: tokens and pictures.
        advice: For each turn what the expert answers there when it does not err.
        reward: Its reward; None if it is unscored.
    """

    turns: tuple[tuple[Piece, Piece], ...]
    advice: tuple[Piece, ...]
    reward: float | None

    @property
    def piece(self) -> Piece:
        """Tokens and pictures of the whole episode."""
        return join([piece for turn in self.turns for piece in turn])

    @property
    def is_answer(self) -> list[bool]:
        """Which of these tokens are answers."""
        return [is_answer for turn in self.turns for is_answer in (False, True) for _ in turn[is_answer].ids]

    def single_turns(self) -> list[Demonstration]:
        """Cut it up: each turn as an episode that begins and ends there, with the answer that is right."""
        return [
            Demonstration(((shown, right),), (right,), None)
            for (shown, _), right in zip(self.turns, self.advice, strict=True)
        ]


def demonstrate(
    environment: LanguageEnvironment,
    specs: Sequence[Any],
    encoder: TurnEncoder,
    *,
    noise: float,
    seed: int,
    actions: Sequence[str] | None = None,
) -> list[Demonstration]:
    """Play one episode per level as an expert that errs.

    Args:
        environment: One that `rollwise.tasks.experts` knows.
        specs: The levels.
        encoder: Makes tokens of prompts and observations.
        noise: Probability of any action in place of the expert's, at each turn.
        seed: Seed of noise, of choices among equally good actions and of the episodes' chance.
        actions: Actions that noise draws from; None: those of `rollwise.tasks.experts.any_action`.

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
    actions: Sequence[str] | None,
) -> Demonstration:
    shown = encoder.prompt(first_prompt(environment, observation), observation)
    turns: list[tuple[Piece, Piece]] = []
    advice: list[Piece] = []
    rewards: list[float | None] = []
    while True:
        action = best_action(environment, rng)
        advice.append(encoder.answer(action))
        if rng.random() < noise:
            action = actions[int(rng.integers(len(actions)))] if actions else any_action(environment, rng)
        turns.append((shown, encoder.answer(action)))
        turn = environment.take_turn(action)
        rewards.append(turn.reward)
        if turn.done:
            reward = None if None in rewards else float(sum(r for r in rewards if r is not None))
            return Demonstration(tuple(turns), tuple(advice), reward)
        shown = encoder.turn(turn.observation, is_conversational=True)


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


def make_agent(
    name: str,
    output_dir: str | Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    on_progress: Callable[[int, int, float | None], None] | None = None,
) -> Path:
    """Make an embedded agent from random weights: play demonstrations, imitate them, save.

    The same seed, number of threads, machine and library versions give the same weights.

    Args:
        name: One of `AGENTS`.
        output_dir: Folder to write; made if it is not there, its files of the same names are replaced.
        seed: Seed of weights, levels, demonstrations and their order.
        steps: Optimizer steps, the same share of them on single turns; None takes the agent's own.
        on_progress: Called as `on_progress(step, steps, loss)`; with step 0 and None while demonstrations are played.

    Returns:
        The folder: the model, its tokenizer or processor, and `pretrain.json`, which says how it was made.

    Raises:
        ConfigError: No such agent, or `steps` is below 1.
        VersionError: The vision agent's packages are missing.
    """
    if name not in AGENTS:
        raise ConfigError(f"unknown agent {name!r}: choose {', '.join(AGENTS)}")
    if steps is not None and steps < 1:
        raise ConfigError(f"steps is {steps}; it must be 1 or more")
    agent = AGENTS[name]
    steps = agent.steps if steps is None else steps
    if on_progress is not None:
        on_progress(0, steps, None)
    asks = agent.environment == "search_qa"
    settings = dict(agent.settings) | ({"corpus": str(fictions.corpus_path())} if asks else {})
    environment = make_environment(agent.environment, picture=agent.picture, explain_malformed=False, **settings)
    words = {"search_qa": fictions.words(), "countdown": ("Numbers", "Target")}.get(agent.environment, ())
    processor = build_processor() if agent.picture else build_tokenizer(words)
    encoder = TurnEncoder(processor)
    actions: Sequence[str] | None = None
    if asks:
        specs = [row for row in fictions.questions() if not is_held_out(row)][: agent.num_demonstrations]
        actions = tuple(f"<answer>{row['answers'][0]}</answer>" for row in specs[:100])
    else:
        specs = draw_specs(environment, agent.num_demonstrations, seed=seed, levels=agent.levels, split="train")
    demonstrations = demonstrate(environment, specs, encoder, noise=agent.noise, seed=seed, actions=actions)
    sizes = {"hidden_size": agent.hidden_size, "num_layers": agent.num_layers}
    model = build_vision_agent(seed, **sizes) if agent.picture else build_text_agent(seed, tokenizer=processor, **sizes)

    def on_step(first: int, step: int, loss: float) -> None:
        if on_progress is not None:
            on_progress(first + step, steps, loss)

    turn_steps = steps * agent.turn_steps // agent.steps
    turns = [turn for demonstration in demonstrations for turn in demonstration.single_turns()] if turn_steps else []
    stages = ((turns, 0, turn_steps, agent.turn_batch_size), (demonstrations, turn_steps, steps, agent.batch_size))
    for shown, first, last, batch_size in stages:
        if last > first:
            imitate(
                model,
                shown,
                steps=last - first,
                batch_size=batch_size,
                learning_rate=agent.learning_rate,
                seed=seed,
                on_step=partial(on_step, first),
            )
    rewards = [demonstration.reward for demonstration in demonstrations if demonstration.reward is not None]
    record = asdict(agent) | {
        "agent": name,
        "seed": seed,
        "steps": steps,
        "turn_steps": turn_steps,
        "mean_reward_of_demonstrations": float(np.mean(rewards)),
        "rollwise": __version__,
    }
    folder = save_agent(model, processor, Path(output_dir))
    (folder / "pretrain.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return folder
