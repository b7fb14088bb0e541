"""Dynamic sampling: draw prompts until the batch is full of groups whose rewards differ.

Source: DAPO, arXiv 2503.14476, section 3.2. A group of G rollouts of a prompt with success rate p has no reward
variance, hence no gradient, with probability

    p^G + (1 - p)^G

Such groups are dropped and further prompts are drawn. A step is

1. sample   `num_rollouts` rollouts for each of `round_prompts` prompts, none of them twice in a step;
2. filter   groups without variance are dropped: waste, in the ledger as zero_variance;
3. repeat   until `train_prompts` groups vary, or after `max_rounds` rounds, or once every prompt has been drawn;
4. train    on the first `train_prompts` groups that vary, in the order of the draw. The others are surplus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollwise.allocation.groups import KeepsNoGroups, refuse_prompts, varies
from rollwise.allocation.prompt_pool import PromptPool
from rollwise.bounds import check_at_least, check_choices
from rollwise.errors import ConfigError
from rollwise.ledger import Ledger
from rollwise.rollout import Allotment, Group


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Settings of dynamic sampling.

    Attributes:
        train_prompts: Groups with reward variance that a step trains on.
        num_rollouts: Rollouts per prompt (G), at least 2.
        round_prompts: Prompts sampled per round; None: train_prompts.
        max_rounds: Rounds in one step.
        at_bound: What happens when a step's rounds end with fewer than train_prompts groups that vary. "train": it
            trains on those, and the run goes on. "stop": it trains on those, and the run should end, with a message.
            A pool of fewer than train_prompts prompts can fill no batch: it never stops for that.

    Raises:
        ConfigError: If a setting is out of its bounds.
    """

    train_prompts: int = 8
    num_rollouts: int = 8
    round_prompts: int | None = None
    max_rounds: int = 10
    at_bound: Literal["train", "stop"] = "train"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "train_prompts", "max_rounds")
        if self.num_rollouts < 2:
            raise ConfigError(f"num_rollouts is {self.num_rollouts}; a group needs at least 2 rollouts to vary")
        check_at_least(self, 1, "round_prompts", or_none=True)
        check_choices(self, at_bound=("train", "stop"))

    @property
    def prompts_per_round(self) -> int:
        """Prompts sampled per round."""
        return self.train_prompts if self.round_prompts is None else self.round_prompts

    def build(self, pool: PromptPool, rng: np.random.Generator, ledger: Ledger) -> DynamicSamplingAllocator:
        """The allocator with these settings."""
        return DynamicSamplingAllocator(self, pool, ledger)


class DynamicSamplingAllocator(KeepsNoGroups):
    """Samples round after round until enough groups vary."""

    name = "dynamic_sampling"

    def __init__(self, settings: DynamicSampling, pool: PromptPool, ledger: Ledger) -> None:
        self._settings = settings
        self._pool = pool
        self._ledger = ledger
        self._exhausted: str | None = None
        self._last_rounds = self._last_found = self._last_drawn = 0
        self._begin_step()

    def _begin_step(self) -> None:
        self._rounds = 0
        self._drawn: set[int] = set()
        self._varying: list[Group] = []

    def ask(self, step: int, prompts: Sequence[int] | None) -> list[Allotment]:
        """A round of prompts that this step has not drawn yet, until enough groups vary; then nothing."""
        refuse_prompts(prompts, "dynamic sampling")
        settings = self._settings
        if len(self._varying) >= settings.train_prompts or self._rounds == settings.max_rounds:
            return []
        purpose = "resample" if self._rounds else "uniform"
        drawn = self._pool.draw(settings.prompts_per_round, self._drawn)
        self._rounds += bool(drawn)
        self._drawn.update(drawn)
        return [Allotment(prompt, settings.num_rollouts, purpose) for prompt in drawn]

    def tell(self, step: int, groups: list[tuple[Allotment, Group]]) -> None:
        """Keep the groups that vary, settle the others."""
        for _, group in groups:
            if varies(group.rollouts):
                self._varying.append(group)
            else:
                self._ledger.discard(group.rollouts, "zero_variance")

    def take(self, step: int) -> list[Group]:
        """The groups to train on; settles the surplus and ends the step."""
        wanted = self._settings.train_prompts
        for group in self._varying[wanted:]:
            self._ledger.discard(group.rollouts, "surplus")
        taken = self._varying[:wanted]
        self._last_rounds, self._last_found, self._last_drawn = self._rounds, len(self._varying), len(self._drawn)
        self._exhausted = self._stop_message(step) if len(taken) < wanted else None
        self._begin_step()
        return taken

    def _stop_message(self, step: int) -> str | None:
        settings = self._settings
        if settings.at_bound != "stop" or self._pool.num_live < settings.train_prompts:
            return None
        bound = (
            f"max_rounds is {settings.max_rounds}"
            if self._rounds == settings.max_rounds
            else f"all {len(self._drawn)} prompts have been drawn"
        )
        return (
            f"step {step} found {len(self._varying)} groups with reward variance where train_prompts is "
            f"{settings.train_prompts}, in {self._rounds} rounds of {settings.prompts_per_round} prompts ({bound}): "
            "the other prompts are all solved, all hopeless or unscored for this policy. Add prompts of a fitting "
            "difficulty, raise max_rounds or num_rollouts, or train on smaller batches with at_bound='train'"
        )

    @property
    def exhausted(self) -> str | None:
        """Why the last step could not be filled, where `at_bound` is "stop"; else None."""
        return self._exhausted

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step: the reason to stop, with the settings it holds for, and the last step's figures."""
        return {
            "exhausted": self._exhausted,
            "settings": repr(self._settings),
            "last": [self._last_rounds, self._last_found, self._last_drawn],
        }

    def restore(self, state: dict[str, Any], waiting: list[Group]) -> None:
        """Go on from a `state_dict()`. With other settings than before, the run may go on where it had stopped."""
        self._begin_step()
        self._exhausted = state["exhausted"] if state["settings"] == repr(self._settings) else None
        self._last_rounds, self._last_found, self._last_drawn = state["last"]

    def metrics(self) -> dict[str, float]:
        """Figures of the last step for the trainer's log."""
        return {
            "sampling_rounds": float(self._last_rounds),
            "varying_share": self._last_found / self._last_drawn if self._last_drawn else 0.0,
            "epoch": float(self._pool.epoch),
        }
