"""What an evaluation during training says beyond the mean reward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


class HeldOut:
    """Figures of one evaluation, from the completions of its batches.

    - `accuracy`: share of the scored completions that succeed (avg@k); `accuracy/<value>`: the same for each value of a
      column.
    - `pass@k`: share of the prompts whose k scored completions hold a success, for k completions per prompt.
    - `tokens`, `tokens/right`, `tokens/wrong`: mean tokens of all completions, of those that succeed and of those that
      do not.

    Args:
        success_threshold: A completion succeeds if its reward is at least this.

    Attributes:
        counts: Successes and scored completions of each value of the column, in the last evaluation that was taken.
    """

    def __init__(self, success_threshold: float) -> None:
        self._success_threshold = success_threshold
        self.counts: dict[str, tuple[int, int]] = {}
        self._samples: dict[str, list[float]] = defaultdict(list)

    def add(
        self, rewards_B: Sequence[float], tokens_B: Sequence[int], values_B: Sequence[str | None], num_generations: int
    ) -> None:
        """Take in one batch.

        Args:
            rewards_B: Rewards, those of a prompt side by side; NaN: unscored.
            tokens_B: Generated tokens.
            values_B: What accuracies are told apart by; None: nothing.
            num_generations: Completions per prompt, k.
        """
        samples, successes_B = self._samples, []
        for reward, tokens, value in zip(rewards_B, tokens_B, values_B, strict=True):
            samples["tokens"].append(tokens)
            success = float(reward >= self._success_threshold) if reward == reward else None
            successes_B.append(success)
            if success is None:
                continue
            samples["accuracy"].append(success)
            samples["tokens/right" if success else "tokens/wrong"].append(tokens)
            if value is not None:
                samples[f"accuracy/{value}"].append(success)
        for start in range(0, len(successes_B) if num_generations > 1 else 0, num_generations):
            group = [success for success in successes_B[start : start + num_generations] if success is not None]
            if len(group) == num_generations:
                samples[f"pass@{num_generations}"].append(max(group))

    def take(self) -> dict[str, float]:
        """The means; the next evaluation starts from nothing."""
        samples, self._samples = self._samples, defaultdict(list)
        told_apart = {name.removeprefix("accuracy/"): found for name, found in samples.items() if "accuracy/" in name}
        self.counts = {value: (int(sum(found)), len(found)) for value, found in told_apart.items()}
        return {name: sum(found) / len(found) for name, found in sorted(samples.items())}
