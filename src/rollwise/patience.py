"""When a run should end because its prompts no longer teach, and what to say then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollwise.errors import ConfigError
from rollwise.rollout import Rollout


class Patience:
    """Counts prompts in a row that gave no gradient.

    Args:
        num_prompts: How many end the run; 0: none.
        success_threshold: A rollout succeeds if its reward is at least this.

    Raises:
        ConfigError: If `num_prompts` is negative.
    """

    def __init__(self, num_prompts: int, success_threshold: float) -> None:
        if num_prompts < 0:
            raise ConfigError(f"patience_prompts is {num_prompts}; it must be at least 0 (0: never stop)")
        self._limit = num_prompts
        self._success_threshold = success_threshold
        self._prompts = 0
        self._rollouts = [0, 0, 0]  # theirs: how many were scored, succeeded, had loss tokens

    def observe(self, told: Sequence[Rollout], has_gradient: bool) -> None:
        """Count a step's rollouts."""
        if has_gradient:
            self._prompts, self._rollouts = 0, [0, 0, 0]
            return
        self._prompts += len({rollout.prompt_id for rollout in told})
        scored = [rollout.reward for rollout in told if rollout.is_scored]
        self._rollouts[0] += len(scored)
        self._rollouts[1] += sum(reward >= self._success_threshold for reward in scored)
        self._rollouts[2] += sum(rollout.loss_tokens > 0 for rollout in told)

    @property
    def stop_reason(self) -> str | None:
        """Why the run should end now: a message for the user. None: go on."""
        if not self._limit or self._prompts < self._limit:
            return None
        scored, succeeded, with_loss = self._rollouts
        if scored == 0:
            finding = "none of their rollouts could be scored; check the reward function"
        elif with_loss == 0:
            finding = (
                "none of their rollouts has a token that carries loss; if they are cut off and masked, allow longer "
                "completions or do not mask them (and set num_tokens of each Rollout)"
            )
        elif succeeded >= 0.99 * scored:
            finding = "they are all solved; the policy has nothing left to learn here, add harder prompts"
        elif succeeded <= 0.01 * scored:
            finding = (
                "they are all hopeless for this policy; add easier prompts, or more rollouts per prompt, or a "
                "reward that gives part marks"
            )
        else:
            finding = (
                f"{succeeded / scored:.0%} of their rollouts succeed, but no prompt was trained on that shows both "
                "outcomes; take more rollouts per prompt, or with Pilot-Commit widen p_lower and p_upper"
            )
        return (
            f"the last {self._prompts} prompts in a row gave no gradient (patience_prompts is {self._limit}): {finding}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The counts, JSON-able."""
        return {"prompts": self._prompts, "rollouts": list(self._rollouts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._prompts, self._rollouts = state["prompts"], list(state["rollouts"])
