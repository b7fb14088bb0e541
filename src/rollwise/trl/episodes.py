"""Multi-turn episodes as TRL's `rollout_func`: one trajectory row per episode.

The episodes of a generate call go on together, turn by turn: the answers of all that are not over come from one call of
the trainer's own generation (transformers, or vLLM where the trainer uses it), then their environments take a turn. A
row holds the first observation as its prompt; its completion is every answer with what the environment showed between
them, which `env_mask` takes out of the loss.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollwise.errors import ConfigError
from rollwise.tasks.batch import EnvironmentBatch
from rollwise.tasks.conversation import Piece, TurnEncoder, join
from rollwise.tasks.environment import Observation
from rollwise.trl.trajectories import IMAGES, MESSAGES

if TYPE_CHECKING:
    from rollwise.trl.trainer import RollwiseGRPOTrainer

#: Column of what `EpisodeRollouts` returns that holds each episode's reward.
REWARD = "episode_reward"


def episode_reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """The environment's reward of each episode, as one of `reward_funcs`; None for an unscored one."""
    if REWARD not in columns:
        raise ConfigError("episode_reward needs the trainer's rollout_func to be a rollwise.trl.EpisodeRollouts")
    return list(columns[REWARD])


@dataclass
class Episode:
    """One episode as it was played.

    Attributes:
        prompt: What it began with.
        observations: What the model was shown before each answer.
        answers: Token ids of each answer.
        texts: The answers as text.
        rewards: The environment's reward of each turn.
        pieces: What was shown between the answers.
        logprobs: Log-probs of the answers' tokens where generation gives them (vLLM), else empty.
        reward: Sum of the rewards; None for an unscored episode.
        unscored: Why it is unscored, or None.
        is_success: Whether the task was accomplished.
        ended_by: `"environment"`, `"max_turns"`, `"max_episode_tokens"` or `"error"`.
    """

    prompt: Piece
    observations: list[Observation]
    answers: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    reward: float | None = 0.0
    unscored: str | None = None
    is_success: bool = False
    ended_by: str = ""

    @property
    def context(self) -> Piece:
        """Everything so far, prompt and completion."""
        parts = [self.prompt]
        for i, answer in enumerate(self.answers):
            parts += [Piece(answer), *self.pieces[i : i + 1]]
        return join(parts)

    @property
    def images(self) -> list[Any]:
        """The pictures of all turns that the model was shown, as PIL images."""
        return [image for piece in (self.prompt, *self.pieces) for image in piece.images]

    def completion(self, eos_token_id: int) -> tuple[list[int], list[int], list[float]]:
        """Token ids after the prompt, whether the model wrote each, and log-probs of these (0 for all others)."""
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        for i, answer in enumerate(self.answers):
            between = self.pieces[i - 1].ids if i else []
            ids += [*between, *answer]
            mask += [0] * len(between) + [1] * len(answer)
            logprobs += [0.0] * len(between) + (self.logprobs[i] if self.logprobs else [0.0] * len(answer))
        # A row of no token at all would be none; an episode that never began has one that carries no loss.
        return (ids, mask, logprobs) if ids else ([eos_token_id], [0], [0.0])

    def messages(self) -> list[dict[str, str]]:
        """The episode after its prompt as messages: answers, and what was shown after each but the last."""
        found: list[dict[str, str]] = []
        for i, text in enumerate(self.texts):
            if i:
                found.append({"role": "user", "content": self.observations[i].text})
            found.append({"role": "assistant", "content": text})
        return found or [{"role": "assistant", "content": ""}]


class EpisodeRollouts:
    """Plays episodes of an environment, as `RollwiseGRPOTrainer`'s `rollout_func`; use `episode_reward` with it.

    The data set has a column `spec` (see `rollwise.tasks.levels`); all rollouts of a prompt play the same level. An
    episode is one rollout to everything else: to the group, the ledger, the buffer and a draw from it. `max_completion_
    length` bounds the tokens of one answer.

    The chance inside an episode (slippery ice) depends on the trainer's seed, the step and the episode's place in the
    batch, so that a resumed run meets the same; in evaluations it is the same every time.

    Args:
        environment: A name of `rollwise.tasks.levels.ENVIRONMENTS`, such as `"frozen_lake"`, or `my_module:MyClass`.
        max_episode_tokens: Prompt and completion of an episode are no longer than this: one that has no room for
            another answer ends there, with the reward that it has. None: the model's `max_position_embeddings`.
        num_processes: How many processes run environments that may hang.
        settings: Settings of the environment, for example `slippery=True`.

    Attributes:
        episodes: Those of the last call on this process.

    Raises:
        ConfigError: There is no such environment or setting. When called: the trainer is not a `RollwiseGRPOTrainer`,
            the data set has no column `spec`, or a prompt leaves no room for an answer.
    """

    def __init__(
        self,
        environment: str,
        *,
        max_episode_tokens: int | None = None,
        num_processes: int = 4,
        **settings: Any,
    ) -> None:
        if max_episode_tokens is not None and max_episode_tokens < 2:
            raise ConfigError(f"max_episode_tokens is {max_episode_tokens}; it must be 2 or more, or None")
        self.batch = EnvironmentBatch(environment, settings, num_processes=num_processes)
        self.max_episode_tokens = max_episode_tokens
        self.episodes: list[Episode] = []
        self._encoder: TurnEncoder | None = None
        self._calls = (-1, 0)  # step, and calls of this step so far

    def __call__(self, prompts: Sequence[Any], trainer: RollwiseGRPOTrainer) -> dict[str, Any]:
        """Play one episode per prompt.

        Returns:
            What TRL wants of a `rollout_func`: `prompt_ids`, `completion_ids`, `logprobs` and `env_mask`; and columns
            for reward functions: `episode_reward`, `episode_success` and `episode_turns`.
        """
        examples = getattr(trainer, "rollout_examples", None)
        if examples is None:
            raise ConfigError(
                f"EpisodeRollouts was called by a {type(trainer).__name__}, which does not say what data its prompts "
                "come from; use rollwise.trl.RollwiseGRPOTrainer"
            )
        if len(examples) != len(prompts) or "spec" not in examples[0]:
            raise ConfigError(
                f"the data set has the columns {sorted(examples[0])} and no 'spec'; make it with "
                "rollwise.tasks.levels.load_dataset or dataset_of"
            )
        if self._encoder is None:
            self._encoder = TurnEncoder(trainer.processing_class)
        specs = [json.loads(x["spec"]) if isinstance(x["spec"], str) else x["spec"] for x in examples]
        first = self.batch.reset(specs, self._seeds(len(specs), trainer))
        self.episodes = [
            Episode(self._encoder.prompt(prompt, observation), [observation])
            for prompt, observation in zip(prompts, first, strict=True)
        ]
        for episode, why in zip(self.episodes, self.batch.unscored, strict=True):
            if why is not None:
                episode.ended_by, episode.unscored = "error", why
        self._play(trainer, is_conversational=not isinstance(prompts[0], str))
        return self._as_trl(trainer)

    def _seeds(self, num_episodes: int, trainer: RollwiseGRPOTrainer) -> list[int]:
        step = int(trainer.state.global_step) if trainer.model.training else -1
        same = step >= 0 and self._calls[0] == step
        self._calls = (step, self._calls[1] + 1 if same else 0)
        entropy = [int(trainer.args.seed), step + 1, self._calls[1], int(trainer.accelerator.process_index)]
        seeds: list[int] = np.random.SeedSequence(entropy).generate_state(num_episodes).tolist()
        return seeds

    def _play(self, trainer: RollwiseGRPOTrainer, *, is_conversational: bool) -> None:
        assert self._encoder is not None
        room = self.max_episode_tokens or _context_tokens(trainer)
        eos_token_ids = set(_eos_token_ids(trainer))
        while True:
            live = [i for i, episode in enumerate(self.episodes) if not episode.ended_by]
            contexts = [self.episodes[i].context for i in live]
            for i, context in zip(live, contexts, strict=True):
                if len(context.ids) + trainer.max_completion_length > room:
                    self._end_for_length(self.episodes[i], len(context.ids), room, trainer.max_completion_length)
            kept = [(i, context) for i, context in zip(live, contexts, strict=True) if not self.episodes[i].ended_by]
            answers = self._generate(trainer, [context for _, context in kept])
            if answers is None:
                break
            actions: list[str | None] = [None] * len(self.episodes)
            for (i, _), (ids, logprobs) in zip(kept, answers, strict=True):
                actions[i] = trainer._text_tokenizer.decode(ids, skip_special_tokens=True)
                self.episodes[i].answers.append(ids)
                self.episodes[i].texts.append(actions[i] or "")
                if logprobs is not None:
                    self.episodes[i].logprobs.append(logprobs)
            self._take_turns([i for i, _ in kept], actions)
            for i, _ in kept:
                episode = self.episodes[i]
                if not episode.ended_by:
                    ended = episode.answers[-1][-1:] != [] and episode.answers[-1][-1] in eos_token_ids
                    episode.pieces.append(
                        self._encoder.turn(
                            episode.observations[-1], is_conversational=is_conversational, answer_ended=ended
                        )
                    )
        for episode in self.episodes:
            rewards = [reward for reward in episode.rewards if reward is not None]
            is_scored = episode.ended_by != "error" and len(rewards) == len(episode.rewards)
            episode.reward = float(sum(rewards)) if is_scored else None

    def _take_turns(self, live: Sequence[int], actions: Sequence[str | None]) -> None:
        # Environments of episodes that ran out of tokens go on waiting; any answer will do, for nobody looks at it.
        self.batch.step(["" if action is None else action for action in actions])
        turns = self.batch.turns
        for i in live:
            episode, turn = self.episodes[i], turns[i][-1]
            episode.rewards.append(turn.reward)
            episode.observations.append(turn.observation)
            episode.is_success = turn.is_success
            if turn.unscored is not None:
                episode.ended_by, episode.unscored = "error", turn.unscored
            elif turn.done:
                episode.ended_by = "environment" if turn.terminated else "max_turns"

    @staticmethod
    def _end_for_length(episode: Episode, num_tokens: int, room: int, answer_tokens: int) -> None:
        if not episode.answers:
            raise ConfigError(
                f"a prompt of {num_tokens} tokens leaves no room for an answer of max_completion_length "
                f"{answer_tokens} within {room} tokens; raise max_episode_tokens, or shorten prompts or answers"
            )
        episode.pieces.pop()  # what nobody answers is not part of the row
        episode.ended_by = "max_episode_tokens"

    def _generate(
        self, trainer: RollwiseGRPOTrainer, contexts: list[Piece]
    ) -> list[tuple[list[int], list[float] | None]] | None:
        """One answer to each context, in one call of TRL's; None once no process has one left.

        Every process makes the same number of calls with equally many contexts, as vLLM's server and sharded models
        want it: those that have fewer repeat one, and throw the answers away.
        """
        accelerator = trainer.accelerator
        num_live = len(contexts)
        if accelerator.num_processes > 1:
            counts = accelerator.gather(torch.tensor([num_live], device=accelerator.device)).tolist()
            most = max(counts)
            contexts = contexts + [contexts[0] if contexts else self.episodes[0].prompt] * (most - num_live)
        if not contexts:
            return None
        together = join(contexts)
        fields: dict[str, Any] = dict(together.tensors)
        for name in together.types:
            fields[name] = [context.types.get(name, [0] * len(context.ids)) for context in contexts]
        has_images = bool(together.images)
        images = [list(context.images) or None for context in contexts] if has_images else None
        generate = trainer._generate_single_turn
        known = inspect.signature(generate).parameters
        more = {"num_generations": 1} if "num_generations" in known else {}
        ids, logprobs = generate([context.ids for context in contexts], images, fields, **more)
        ids, kept = ids[:num_live], logprobs[:num_live] if logprobs is not None else [None] * num_live
        return list(zip(ids, kept, strict=True))

    def _as_trl(self, trainer: RollwiseGRPOTrainer) -> dict[str, Any]:
        eos_token_id = trainer._text_tokenizer.eos_token_id
        rows = [episode.completion(eos_token_id) for episode in self.episodes]
        has_logprobs = any(episode.logprobs for episode in self.episodes)
        return {
            "prompt_ids": [episode.prompt.ids for episode in self.episodes],
            "completion_ids": [ids for ids, _, _ in rows],
            "env_mask": [mask for _, mask, _ in rows],
            "logprobs": [logprobs for _, _, logprobs in rows] if has_logprobs else None,
            REWARD: [episode.reward for episode in self.episodes],
            "episode_success": [episode.is_success for episode in self.episodes],
            "episode_turns": [len(episode.answers) for episode in self.episodes],
            IMAGES: [episode.images for episode in self.episodes],
            MESSAGES: [episode.messages() for episode in self.episodes],
        }


def _context_tokens(trainer: RollwiseGRPOTrainer) -> int:
    config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    return int(getattr(config, "max_position_embeddings", 1 << 20))


def _eos_token_ids(trainer: RollwiseGRPOTrainer) -> list[int]:
    known = getattr(trainer, "eos_token_ids", None)
    return list(known) if known is not None else [trainer._text_tokenizer.eos_token_id]
