"""Environments that a language model acts in: one format of observations, prompts and answers for all of them.

**Observation.** A text, and in the picture versions also images: `(height, width, 3)` arrays of uint8 in RGB. As a
plain Gymnasium environment it is the `Dict` of the spaces `text` and, with pictures, `image`.

**Spec.** What a level is: a JSON-able dict, for example `{"map": "SFFF/FHFH/FFFH/HFFG"}`. It stands in the data set's
row, so that every rollout of a group plays the same level. Chance inside an episode (slippery ice) is not part of it:
that comes from the episode's own seed.

**Prompt.** The environment's `instructions` and the first observation: as messages (`system`, then `user`), or as plain
text. Each later observation is a `user` message, or plain text. `rollwise.tasks.levels` makes data sets of prompts.

**Answer.** One text per turn. `<action>left</action>`, or the bare word `left`; what stands before a `</think>` is not
looked at. Environments say in their docstring which actions they know. An answer that cannot be read is *malformed*: it
costs `malformed_reward`, changes nothing else, and takes a turn. It never ends or crashes an episode.

**Reward.** One number per turn; the episode's reward is their sum.

**Limits.** An episode of `max_turns` turns is truncated. A step that raises, gives a reward that is no finite number or
takes longer than `timeout_seconds` ends the episode as *unscored*: its reward is None (NaN in the Gymnasium interface,
which wants a number), with the reason beside it, and never a silent 0. An environment in this process can be timed but
not stopped. `rollwise.tasks.batch.EnvironmentBatch` runs classes with `may_hang` in other processes, which it kills
when a step or reset takes too long; and a reset that raises makes its episode unscored, too.
"""

from __future__ import annotations

import math
import string
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from rollwise.bounds import check_at_least
from rollwise.errors import ConfigError, ProtocolError, VersionError

try:
    import gymnasium
    from gymnasium import spaces
except ImportError as error:
    raise VersionError("environments need gymnasium: pip install 'rollwise[envs]'") from error

__all__ = ["PICTURE_PIXELS", "AnyText", "LanguageEnvironment", "Observation", "Outcome", "Turn"]

PICTURE_PIXELS = 64
"""Height and width of a picture."""

_MAX_TEXT = 1 << 20

Spec = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model is shown.

    Attributes:
        text: A text; never None, perhaps empty.
        images: uint8 arrays of shape (height, width, 3), RGB; none in text versions.
    """

    text: str
    images: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an environment makes of one answer, before the limits are applied.

    Attributes:
        observation: What the model is shown next.
        reward: The turn's reward, or None where it cannot be known, which ends the episode as unscored.
        done: Whether the episode is over.
        is_success: Whether the task is accomplished.
        is_malformed: Whether the answer could not be read.
        unscored: Why the reward is None; for the others None.
    """

    observation: Observation
    reward: float | None
    done: bool = False
    is_success: bool = False
    is_malformed: bool = False
    unscored: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode, with the limits applied.

    Attributes:
        observation: What the model is shown next; after the end, the last thing that can be seen.
        reward: The turn's reward; None where the episode is unscored.
        terminated: The episode ended of itself.
        truncated: It was ended by a limit.
        is_success: Whether the task is accomplished.
        is_malformed: Whether the answer could not be read.
        unscored: Why the episode is unscored; None otherwise.
    """

    observation: Observation
    reward: float | None
    terminated: bool = False
    truncated: bool = False
    is_success: bool = False
    is_malformed: bool = False
    unscored: str | None = None

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


class AnyText(spaces.Text):
    """Texts of any characters, up to a length; samples are of printable ASCII."""

    def __init__(self, max_length: int = _MAX_TEXT) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        """Tell whether `x` is a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Draw a text of at most 32 characters."""
        if mask is None and probability is None:
            length = int(self.np_random.integers(0, 33))
            mask = (min(length, self.max_length), None)
        return super().sample(mask, probability)


@dataclass(kw_only=True, eq=False)
class LanguageEnvironment(gymnasium.Env[dict[str, Any], str]):
    """Base of the environments. A subclass is a dataclass of its settings and writes `draw_spec`, `_begin` and `_play`.

    Args:
        max_turns: Turns of an episode, at most.
        timeout_seconds: Time limit of one step, and in another process of one reset.
        malformed_reward: Reward of a turn whose answer cannot be read.
        explain_malformed: Whether the observation after such an answer says in words how to answer. Off, it is the
            observation before once more, which suits small models of few words.
        picture: Whether observations have a picture.
        show_text: Whether observations with a picture have their text beside it; without, the picture must do.
        render_mode: `ansi` (text) or, where there are pictures, `rgb_array`, for Gymnasium's `render`.

    Raises:
        ConfigError: A setting is out of its bounds.
    """

    max_turns: int = 10
    timeout_seconds: float = 10.0
    malformed_reward: float = -0.1
    explain_malformed: bool = True
    picture: bool = False
    show_text: bool = True
    render_mode: str | None = None
    _spec: Spec | None = field(init=False, default=None, repr=False)
    _turns: int = field(init=False, default=0, repr=False)
    _ended: bool = field(init=False, default=True, repr=False)
    _last: Observation = field(init=False, default=Observation(""), repr=False)

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}  # noqa: RUF012 - Gymnasium's, and no field
    name: ClassVar[str] = ""
    has_pictures: ClassVar[bool] = False
    """Whether there is a picture version."""
    may_hang: ClassVar[bool] = True
    """Whether a step may take for ever; only a class that is known to be quick says False."""
    levels: ClassVar[tuple[str, ...]] = ()
    """Examples of what `draw_spec` takes, easiest first; empty where problems come from data."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_turns")
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds is {self.timeout_seconds}; it must be above 0, for example 10")
        if not math.isfinite(self.malformed_reward):
            raise ConfigError(f"malformed_reward is {self.malformed_reward}; it must be a finite number")
        if self.picture and not self.has_pictures:
            raise ConfigError(f"{self.name or type(self).__name__} has no pictures; set picture to False")
        modes = (None, "ansi", "rgb_array") if self.has_pictures else (None, "ansi")
        if self.render_mode not in modes:
            raise ConfigError(f"render_mode is {self.render_mode!r}; it must be one of {modes}")

    @cached_property
    def observation_space(self) -> spaces.Dict:  # type: ignore[override]
        """`Dict` of `text` and, with pictures, `image`; made when asked for, which a batch never does."""
        shown: dict[str, spaces.Space[Any]] = {"text": AnyText()}
        if self.picture:
            shown["image"] = spaces.Box(0, 255, (PICTURE_PIXELS, PICTURE_PIXELS, 3), np.uint8)
        return spaces.Dict(shown)

    @cached_property
    def action_space(self) -> AnyText:  # type: ignore[override]
        """Any text."""
        return AnyText()

    @property
    def instructions(self) -> str:
        """What the model is told before the first observation: the rules, and how to answer."""
        raise NotImplementedError

    @abstractmethod
    def draw_spec(self, level: str, rng: np.random.Generator) -> dict[str, Any]:
        """Draw a level at random.

        Raises:
            ConfigError: No such level.
        """
        raise NotImplementedError

    @abstractmethod
    def _begin(self, spec: Spec) -> Observation:
        """Start an episode on a level; chance is drawn from `self.np_random`. A wrong spec raises ConfigError."""
        raise NotImplementedError

    @abstractmethod
    def _play(self, answer: str) -> Outcome:
        """Take one turn."""
        raise NotImplementedError

    def _picture(self) -> np.ndarray:
        """Draw the present state, as uint8 of shape (64, 64, 3)."""
        raise NotImplementedError

    def level_of(self, spec: Spec) -> str:
        """Name the bucket of difficulty that a level belongs to."""
        return str(spec.get("level", ""))

    def begin(self, spec: Spec | None = None, seed: int | None = None) -> Observation:
        """Start an episode.

        Args:
            spec: The level; None draws one of `levels`.
            seed: Seed of the episode's chance, and of that draw. None goes on with the generator as it is.

        Returns:
            The first observation.

        Raises:
            ConfigError: The spec is not one of this environment, or there is none and none can be drawn.
        """
        super().reset(seed=seed)
        if spec is None:
            if not self.levels:
                raise ConfigError(f"{self.name} has no levels of its own: give a spec, reset(options={{'spec': ...}})")
            spec = self.draw_spec(self.levels[int(self.np_random.integers(len(self.levels)))], self.np_random)
        self._spec, self._turns, self._ended = spec, 0, True
        self._last = self._begin(spec)
        self._ended = False
        return self._last

    def take_turn(self, answer: str) -> Turn:
        """Take one turn with the model's answer, within the limits.

        Raises:
            ProtocolError: The episode is over, or none has begun.
        """
        if self._ended:
            raise ProtocolError("the episode is over or has not begun: call begin() or reset() first")
        self._turns += 1
        started = time.monotonic()
        try:
            outcome = self._play(answer)
        except Exception as error:  # noqa: BLE001 - whatever a task's code raises makes this episode unscored
            return self._end_unscored(f"{type(error).__name__}: {error}"[:500])
        seconds = time.monotonic() - started
        if seconds > self.timeout_seconds:
            return self._end_unscored(
                f"a step took {seconds:.1f} s, more than timeout_seconds {self.timeout_seconds:g}"
            )
        reward = outcome.reward
        if reward is None or not math.isfinite(reward):
            return self._end_unscored(outcome.unscored or f"the reward is {reward}")
        self._last = outcome.observation
        truncated = not outcome.done and self._turns >= self.max_turns
        self._ended = outcome.done or truncated
        return Turn(
            outcome.observation,
            float(reward),
            outcome.done,
            truncated,
            outcome.is_success,
            outcome.is_malformed,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode, as Gymnasium has it; `options={"spec": ...}` names the level.

        Returns:
            The observation, and `{"spec": ...}`.

        Raises:
            ConfigError: As `begin`.
        """
        observation = self.begin((options or {}).get("spec"), seed)
        return self._as_dict(observation), {"spec": dict(self._spec or {})}

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Take one turn, as Gymnasium has it.

        Returns:
            Observation, reward (NaN where unscored), terminated, truncated, and `is_success`, `is_malformed` and
            `unscored` (None, or the reason).

        Raises:
            ProtocolError: As `take_turn`.
        """
        turn = self.take_turn(action)
        info = {"is_success": turn.is_success, "is_malformed": turn.is_malformed, "unscored": turn.unscored}
        reward = math.nan if turn.reward is None else turn.reward
        return self._as_dict(turn.observation), reward, turn.terminated, turn.truncated, info

    def render(self) -> Any:
        """Show the present state: a text in `ansi` mode, a picture in `rgb_array` mode, else None."""
        if self.render_mode == "rgb_array":
            return self._picture()
        return self._last.text if self.render_mode == "ansi" else None

    def _malformed(self, choices: Sequence[str]) -> Outcome:
        """Answer an answer that cannot be read."""
        text = self._last.text
        if self.explain_malformed:
            explanation = (
                f"Not understood. Answer with {choices[0]}."
                if len(choices) == 1
                else (f"Not understood. Answer with one of {', '.join(choices)}.")
            )
            text = f"{explanation}\n{text.removeprefix(explanation + chr(10))}"
        return Outcome(Observation(text, self._last.images), self.malformed_reward, is_malformed=True)

    def _end_unscored(self, reason: str) -> Turn:
        self._ended = True
        return Turn(self._last, None, truncated=True, unscored=reason)

    def _observe(self, text: str) -> Observation:
        if not self.picture:
            return Observation(text)
        return Observation(text if self.show_text else "", (self._picture(),))

    def _as_dict(self, observation: Observation) -> dict[str, Any]:
        shown: dict[str, Any] = {"text": observation.text}
        if self.picture:
            shown["image"] = observation.images[0].copy()  # an observation may be shown again
        return shown
