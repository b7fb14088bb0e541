"""Belief allocation: rollouts go to the prompts that are believed to teach most, and stop early where they do not.

Rollwise's own. Each prompt i has a Beta belief of its success rate, made of what was seen of it and of its bucket:

    m ~ Beta(S_k + 1/2, F_k + 1/2)                                  success rate of its bucket k, a Thompson sample
    p_i ~ Beta(a, b),  a = kappa m + s_i,  b = kappa (1 - m) + f_i  with kappa = `prior_strength`

where s, f count the successes and failures of the prompt and S, F those of its bucket, all forgotten with a half-life.
For binary rewards the magnitude of a group's normalised gradient goes with sqrt(p (1 - p)) ("Spend Your Rollouts Where
It Counts", arXiv 2605.26606, Prop. 3.1), so the prompts of a step are those of the largest

    E sqrt(p (1 - p)) = B(a + 1/2, b + 1/2) / B(a, b)

with B the beta function, but for a share that is spread evenly over the buckets: none is ever forgotten, be it hopeless
or solved so far. A step is

1. wave 1   `first_rollouts` rollouts for each of `first_prompts` prompts;
2. wave 2   `second_rollouts` more where both outcomes have shown, or where the chance that they will is at least
            `min_chance`; and for all prompts of the even share;
3. train    on both waves as one group. What was not continued is waste.

With n rollouts of one outcome, r of them successes (r = 0 or n), the chance that the other one shows in m more is

    1 - prod_{j<m} (c + j) / (a + b + j),   c = b if r = 0, c = a if r = n
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwise.allocation.groups import KeepsNoGroups, outcomes, refuse_prompts, varies
from rollwise.allocation.prompt_pool import PromptPool
from rollwise.bounds import check_at_least, check_share
from rollwise.errors import ConfigError
from rollwise.ledger import Ledger
from rollwise.rollout import Allotment, Group


@dataclass(frozen=True, kw_only=True)
class Belief:
    """Settings of belief allocation.

    Attributes:
        train_prompts: What a step's size is derived from: prompts that are trained on per step, about.
        first_rollouts: Rollouts per prompt in the first wave.
        second_rollouts: Rollouts per prompt in the second wave.
        first_prompts: Prompts in the first wave; None: 3/2 of train_prompts. A step trains on at most as many.
        buckets: Bucket of each prompt, integers from 0 on, in the order of the prompt ids: prompts of one bucket are
            believed to be alike before anything is known of them. None: all are in one.
        half_life_steps: What was seen counts half after so many training steps.
        prior_strength: Rollouts that the bucket's rate counts as in a prompt's belief (kappa).
        explore_share: Share of the first wave's prompts that is spread evenly over the buckets, at random within them.
        min_chance: Least chance of a second outcome at which a prompt of one outcome so far gets its second wave.
        cooldown_steps: A prompt rests so long before it is drawn again, as far as the pool is large enough.
        candidates_per_prompt: Prompts that are looked at per prompt chosen: so many at random, and so many of those
            seen before.
        success_threshold: A rollout succeeds if its reward is at least this.

    Raises:
        ConfigError: If a setting is out of its bounds.
    """

    train_prompts: int = 32
    first_rollouts: int = 4
    second_rollouts: int = 12
    first_prompts: int | None = None
    buckets: Sequence[int] | None = None
    half_life_steps: float = 30.0
    prior_strength: float = 1.0
    explore_share: float = 0.2
    min_chance: float = 0.5
    cooldown_steps: int = 10
    candidates_per_prompt: int = 6
    success_threshold: float = 1.0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "train_prompts", "first_rollouts", "second_rollouts", "candidates_per_prompt")
        check_at_least(self, 1, "first_prompts", or_none=True)
        for name in ("half_life_steps", "prior_strength"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be finite and above 0")
        check_share(self, "explore_share", "min_chance")
        check_at_least(self, 0, "cooldown_steps")
        if self.buckets is not None and (len(self.buckets) == 0 or min(self.buckets) < 0):
            smallest = min(self.buckets, default=None)
            raise ConfigError(
                f"buckets has {len(self.buckets)} values, the smallest {smallest}; give integers from 0 on, one per "
                "prompt, or None for a single bucket"
            )

    @property
    def prompts_per_step(self) -> int:
        """Prompts in the first wave."""
        return math.ceil(1.5 * self.train_prompts) if self.first_prompts is None else self.first_prompts

    def build(self, pool: PromptPool, rng: np.random.Generator, ledger: Ledger) -> BeliefAllocator:
        """The allocator with these settings.

        Raises:
            ConfigError: If there are not as many buckets given as prompts.
        """
        return BeliefAllocator(self, pool, rng, ledger)


class BeliefAllocator(KeepsNoGroups):
    """Keeps the beliefs; chooses the prompts of the first wave and those that go on to the second."""

    name = "belief"

    def __init__(self, settings: Belief, pool: PromptPool, rng: np.random.Generator, ledger: Ledger) -> None:
        num_prompts = pool.num_prompts
        buckets = np.zeros(num_prompts, dtype=np.int64) if settings.buckets is None else np.asarray(settings.buckets)
        if buckets.shape != (num_prompts,):
            raise ConfigError(f"buckets has the shape {buckets.shape} for {num_prompts} prompts; give one per prompt")
        self._settings = settings
        self._rng = rng
        self._ledger = ledger
        self._bucket_P: NDArray[np.int64] = buckets.astype(np.int64)
        self._members = [np.flatnonzero(self._bucket_P == k) for k in range(int(buckets.max()) + 1)]
        self._members = [members for members in self._members if len(members)]
        self._counts_P2 = np.zeros((num_prompts, 2))  # successes and failures, as far as not forgotten
        self._bucket_counts_K2 = np.zeros((int(buckets.max()) + 1, 2))
        self._last_step_P = np.full(num_prompts, -(1 << 40), dtype=np.int64)  # when it was drawn last
        self._step = 0  # up to which everything has been forgotten
        self._begin_step()

    def _begin_step(self) -> None:
        self._wave = 0
        self._groups: list[Group] = []
        self._explored: set[int] = set()

    def ask(self, step: int, prompts: Sequence[int] | None) -> list[Allotment]:
        """The first wave, the second wave, then nothing."""
        refuse_prompts(prompts, "belief allocation")
        settings = self._settings
        self._wave += 1
        if self._wave == 1:
            self._forget(step)
            chosen = self._choose(step)
            self._last_step_P[chosen] = step
            return [Allotment(int(prompt), settings.first_rollouts, "pilot") for prompt in chosen]
        if self._wave == 2:
            self._drop_hopeless()
            return [Allotment(group.prompt, settings.second_rollouts, "commit") for group in self._groups]
        return []

    def _forget(self, step: int) -> None:
        kept = 0.5 ** ((step - self._step) / self._settings.half_life_steps)
        self._counts_P2 *= kept
        self._bucket_counts_K2 *= kept
        self._step = step

    def _choose(self, step: int) -> NDArray[np.int64]:
        """The prompts of the first wave: an even share over the buckets, and those of the largest expected signal."""
        settings, num_prompts = self._settings, len(self._bucket_P)
        wanted = min(settings.prompts_per_step, num_prompts)
        rested_P = step - self._last_step_P >= settings.cooldown_steps
        if np.count_nonzero(rested_P) < wanted:  # a small pool: all that have not been drawn in this very step
            rested_P = np.ones(num_prompts, dtype=bool)
        explored = self._spread(round(settings.explore_share * wanted), rested_P)
        self._explored = set(explored)

        looked_at = min(num_prompts, settings.candidates_per_prompt * wanted)
        fresh = self._rng.choice(num_prompts, looked_at, replace=False, shuffle=False)
        seen = np.flatnonzero((self._counts_P2[:, 0] + self._counts_P2[:, 1] > 0.5) & rested_P)
        if len(seen) > looked_at:
            seen = seen[self._rng.choice(len(seen), looked_at, replace=False, shuffle=False)]
        candidates = np.setdiff1d(np.concatenate([fresh[rested_P[fresh]], seen]), explored)
        if len(candidates) + len(explored) < wanted:  # too few of those looked at have rested
            candidates = np.setdiff1d(np.flatnonzero(rested_P), explored)
        signals = self.expected_signals(candidates)
        best = candidates[np.argsort(-signals, kind="stable")[: wanted - len(explored)]]
        return np.concatenate([np.array(explored, dtype=np.int64), best])

    def _spread(self, wanted: int, rested_P: NDArray[np.bool_]) -> list[int]:
        """Different prompts, one of each bucket in turn, in an order of buckets drawn anew."""
        queues = []
        for k in self._rng.permutation(len(self._members)).tolist():
            rested = self._members[k][rested_P[self._members[k]]]
            num_draws = min(len(rested), -(-wanted // len(self._members)) + 1)
            queues.append(self._rng.choice(rested, num_draws, replace=False).tolist() if num_draws else [])
        spread: list[int] = []
        while len(spread) < wanted and any(queues):
            for queue in queues:
                if queue and len(spread) < wanted:
                    spread.append(queue.pop())
        return spread

    def expected_signals(self, prompts_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """`E sqrt(p (1 - p))` of these prompts (B,) under a sample of their buckets' rates, shape (B,), at most 1/2."""
        a_B, b_B = self._beliefs(prompts_B, self._rng)
        return _half_step(a_B) * _half_step(b_B) / (a_B + b_B)

    def _beliefs(
        self, prompts_B: NDArray[np.int64], rng: np.random.Generator | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """a and b of these prompts' beliefs; without a generator, with the mean of their buckets' rates."""
        of_bucket_B2 = self._bucket_counts_K2[self._bucket_P[prompts_B]] + 0.5
        if rng is None:
            rates_B = of_bucket_B2[:, 0] / of_bucket_B2.sum(axis=1)
        else:
            rates_B = rng.beta(of_bucket_B2[:, 0], of_bucket_B2[:, 1])
        rates_B = np.clip(rates_B, 1e-3, 1 - 1e-3)
        strength = self._settings.prior_strength
        counts_B2 = self._counts_P2[prompts_B]
        return strength * rates_B + counts_B2[:, 0], strength * (1 - rates_B) + counts_B2[:, 1]

    def _drop_hopeless(self) -> None:
        """Keep the groups that get a second wave; settle the others in the ledger."""
        settings = self._settings
        alike = [g for g in self._groups if g.prompt not in self._explored and not varies(g.rollouts)]
        shown = [outcomes(group.rollouts, settings.success_threshold) for group in alike]
        succeeded = [any(found) for found in shown]
        chances = self._chances_of_the_other([group.prompt for group in alike], succeeded)
        dropped = set()
        for group, found, success, chance in zip(alike, shown, succeeded, chances, strict=True):
            if not found or chance < settings.min_chance:
                self._ledger.discard(group.rollouts, "too_easy" if success else "too_hard")
                dropped.add(group.prompt)
        self._groups = [group for group in self._groups if group.prompt not in dropped]

    def _chances_of_the_other(self, prompts: Sequence[int], succeeded: Sequence[bool]) -> list[float]:
        """Chances that the second wave shows an outcome that the first has not."""
        a_B, b_B = self._beliefs(np.array(prompts, dtype=np.int64), None)
        same_B = np.where(np.array(succeeded, dtype=bool), a_B, b_B)
        all_same_B = np.ones(len(prompts))
        for j in range(self._settings.second_rollouts):
            all_same_B *= (same_B + j) / (a_B + b_B + j)
        chances: list[float] = (1.0 - all_same_B).tolist()
        return chances

    def tell(self, step: int, groups: list[tuple[Allotment, Group]]) -> None:
        """Update the beliefs; join the second wave to the first."""
        succeeded = [outcomes(group.rollouts, self._settings.success_threshold) for _, group in groups]
        seen_G2 = np.array([(o.count(True), o.count(False)) for o in succeeded], dtype=np.float64).reshape(-1, 2)
        prompts_G = np.array([group.prompt for _, group in groups], dtype=np.int64)
        np.add.at(self._counts_P2, prompts_G, seen_G2)
        np.add.at(self._bucket_counts_K2, self._bucket_P[prompts_G], seen_G2)
        first = {group.prompt: group for group in self._groups}
        for request, group in groups:
            if request.purpose == "commit":
                first[group.prompt].join(group)
            else:
                self._groups.append(group)

    def take(self, step: int) -> list[Group]:
        """The groups of both waves; ends the step."""
        groups = self._groups
        self._begin_step()
        return groups

    def state_dict(self) -> dict[str, Any]:
        """The beliefs, of the prompts of which anything is known."""
        known = np.flatnonzero((self._last_step_P >= 0) | (self._counts_P2.sum(axis=1) > 0))
        return {
            "step": self._step,
            "prompts": known.tolist(),
            "counts": self._counts_P2[known].tolist(),
            "last_steps": self._last_step_P[known].tolist(),
            "bucket_counts": self._bucket_counts_K2.tolist(),
        }

    def restore(self, state: dict[str, Any], waiting: list[Group]) -> None:
        """Go on from a `state_dict()`."""
        self._begin_step()
        known = state["prompts"]
        self._step = state["step"]
        self._counts_P2[:] = 0.0
        self._last_step_P[:] = -(1 << 40)
        if known:
            self._counts_P2[known], self._last_step_P[known] = state["counts"], state["last_steps"]
        bucket_counts = np.array(state["bucket_counts"]).reshape(-1, 2)
        if bucket_counts.shape == self._bucket_counts_K2.shape:
            self._bucket_counts_K2[:] = bucket_counts
        else:  # other buckets than before: what is known of the prompts is what is known of them
            self._bucket_counts_K2[:] = 0.0
            np.add.at(self._bucket_counts_K2, self._bucket_P, self._counts_P2)

    def metrics(self) -> dict[str, float]:
        """Figures for the trainer's log."""
        rates = (self._bucket_counts_K2[:, 0] + 0.5) / (self._bucket_counts_K2.sum(axis=1) + 1.0)
        return {
            "prompts_seen": float(np.count_nonzero(self._last_step_P >= 0)),
            "bucket_rate_min": float(rates.min()),
            "bucket_rate_max": float(rates.max()),
        }


def _half_step(x_B: NDArray[np.float64]) -> NDArray[np.float64]:
    """`Gamma(x + 1/2) / Gamma(x)`."""
    return np.array([math.exp(math.lgamma(x + 0.5) - math.lgamma(x)) for x in x_B.tolist()])
