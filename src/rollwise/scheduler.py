"""The rollout scheduler: which prompts get rollouts, and which rollouts are trained on. Read this first.

The scheduler never calls a model. Every trainer integration, the simulator and the tests are these few lines:

    scheduler = RolloutScheduler(prompt_ids, allocation=PilotCommit(...), replay=Replay(...), seed=0)
    while requests := scheduler.ask():          # what to generate next; empty once the batch is complete
        scheduler.tell(generate(requests))      # rollouts, in the order they were asked for
    batch = scheduler.batch()                   # fresh rows, then replayed ones
    update(batch)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollwise.advantage import Scale, check_settings, group_advantages, success_rate
from rollwise.allocation import Allocation, Allocator, PromptPool, Uniform
from rollwise.errors import ConfigError, ProtocolError, RolloutError, StateError
from rollwise.ledger import Ledger
from rollwise.replay import Replay, ReplayBuffer
from rollwise.rollout import Allotment, Batch, Group, PromptId, Request, Rollout, Row

STATE_FORMAT = 1


def _as_reward(value: Any) -> float:
    """Reward functions also return None, bools, and scalars of numpy or torch."""
    return math.nan if value is None else float(value)


class RolloutScheduler:
    """Joins allocation and replay behind `ask`, `tell` and `batch`.

    Args:
        prompt_ids: A stable, unique id per prompt.
        allocation: Who gets rollouts; settings from `rollwise.allocation`.
        replay: What is used again; None or ratio 0: nothing.
        seed: Seed of the one generator behind all decisions.
        scale_rewards: See `rollwise.advantage.group_advantages`.
        ddof: See `rollwise.advantage.group_advantages`.
        std_epsilon: `epsilon` of `rollwise.advantage.group_advantages`.
        success_threshold: A rollout succeeds if its reward is at least this; for the success rate reported.
        drop_zero_variance: Whether rollouts without a gradient (of groups with equal rewards, unscored, fully
            masked) also leave the loss normaliser. They are never among a batch's rows; the question is what the
            loss is divided by. True, as in the methods' papers, makes the gradient larger by about
            1 / (1 - their share). False divides as plain GRPO does.
        patience_prompts: The run should stop once this many prompts in a row gave no gradient; 0: never.

    Raises:
        ConfigError: If there are no prompts, ids repeat or mix int and str, or a setting is out of bounds.
    """

    def __init__(
        self,
        prompt_ids: Sequence[PromptId],
        *,
        allocation: Allocation | None = None,
        replay: Replay | None = None,
        seed: int = 0,
        scale_rewards: Scale = "group",
        ddof: int = 1,
        std_epsilon: float = 1e-4,
        success_threshold: float = 1.0,
        drop_zero_variance: bool = True,
        patience_prompts: int = 1000,
    ) -> None:
        # numpy's scalars become Python's: the saved state must be readable without them
        self.prompt_ids: list[PromptId] = [i.item() if isinstance(i, np.generic) else i for i in prompt_ids]
        self._position = {prompt_id: i for i, prompt_id in enumerate(self.prompt_ids)}
        if not self.prompt_ids:
            raise ConfigError("there are no prompts; give at least one prompt id")
        if not any(all(isinstance(i, kind) for i in self.prompt_ids) for kind in (int, str)):
            kinds = sorted({type(i).__name__ for i in self.prompt_ids})
            raise ConfigError(f"prompt ids are of the types {kinds}; make them all int or all str")
        if len(self._position) < len(self.prompt_ids):
            repeated = len(self.prompt_ids) - len(self._position)
            raise ConfigError(f"{repeated} of {len(self.prompt_ids)} prompt ids repeat; make them unique")
        if patience_prompts < 0:
            raise ConfigError(f"patience_prompts is {patience_prompts}; it must be at least 0 (0: never stop)")
        check_settings(scale_rewards, ddof, std_epsilon)
        self._scale: Scale = scale_rewards
        self._ddof = ddof
        self._std_epsilon = std_epsilon
        self._success_threshold = success_threshold
        self._drop_zero_variance = drop_zero_variance
        self._patience_prompts = patience_prompts

        self.rng = np.random.default_rng(seed)
        self.ledger = Ledger()
        self.pool = PromptPool(len(self.prompt_ids), self.rng)
        self.allocator: Allocator = (allocation or Uniform()).build(self.pool, self.rng, self.ledger)
        self.buffer = ReplayBuffer(replay) if replay is not None and replay.ratio > 0 else None

        self.step = -1  # the step that is open, or was last closed
        self._is_open = False
        self._is_complete = False  # ask() has nothing more for this step
        self._requests: list[Allotment] = []  # asked for and not told yet
        self._told: list[Rollout] = []  # in this step
        self._dry_prompts = 0  # prompts in a row that gave no gradient
        self._dry_rollouts = [0, 0, 0]  # theirs: how many were scored, succeeded, had loss tokens

    def ask(self, step: int | None = None, prompts: Sequence[PromptId] | None = None) -> list[Request]:
        """What to generate next. Empty once the step's batch is complete.

        Args:
            step: The training step whose policy will generate; only looked at in a step's first call. None:
                one more than the last. Ages are differences of these.
            prompts: The step's prompts, where a data loader chooses them (uniform allocation only).

        Raises:
            ProtocolError: If the last requests have not been told yet, or `step` goes back.
            RolloutError: If `prompts` holds an unknown id.
        """
        if self._requests:
            raise ProtocolError(f"{len(self._requests)} requests are unanswered; call tell() before ask()")
        if self._is_open:
            step = self.step
        elif step is None:
            step = self.step + 1
        elif step < self.step:
            raise ProtocolError(f"step {step} is before step {self.step}, which has been trained on")
        positions = None if prompts is None else [self._position_of(prompt_id) for prompt_id in prompts]
        self._requests = self.allocator.ask(step, positions)
        if not self._is_open:
            self.step, self._is_open, self._told = step, True, []
        self._is_complete = not self._requests
        return [Request(self.prompt_ids[r.prompt], r.num_rollouts, r.purpose) for r in self._requests]

    def tell(self, rollouts: Sequence[Rollout]) -> None:
        """Take the rollouts that answer the last requests: each request's rollouts in turn.

        The scheduler sets their purpose and birth step.

        Raises:
            ProtocolError: If nothing was asked for.
            RolloutError: If the number of rollouts or a prompt id does not fit the requests, or a reward is neither
                a number nor None (unscored). Nothing is taken.
        """
        if not self._requests:
            raise ProtocolError("there is nothing to tell: call ask() first and answer what it returns")
        expected = sum(request.num_rollouts for request in self._requests)
        if len(rollouts) != expected:
            raise RolloutError(
                f"{len(rollouts)} rollouts were told where {expected} were asked for "
                f"({len(self._requests)} requests); tell all of them at once, in order"
            )
        groups: list[tuple[Allotment, Group]] = []
        start = 0
        for request in self._requests:
            members = list(rollouts[start : start + request.num_rollouts])
            wanted = self.prompt_ids[request.prompt]
            for i, rollout in enumerate(members):
                if rollout.prompt_id != wanted:
                    raise RolloutError(
                        f"rollout {start + i} is of prompt {rollout.prompt_id!r} where {wanted!r} was asked "
                        "for; tell the rollouts in the order of the requests"
                    )
            groups.append((request, Group(request.prompt, self.step, members)))
            start += request.num_rollouts
        try:
            rewards = [_as_reward(rollout.reward) for rollout in rollouts]
        except (TypeError, ValueError) as error:
            raise RolloutError(f"a reward is no number ({error}); give a float, or NaN for unscored") from error
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.reward = reward
        for request, group in groups:
            for rollout in group.rollouts:
                rollout.purpose = request.purpose
                rollout.birth_step = self.step
        self._requests = []
        self._told += rollouts
        self.ledger.record(rollouts)
        self.allocator.tell(self.step, groups)

    def batch(self) -> Batch:
        """The step's batch: its fresh rows, whole, and a draw from the buffer. Ends the step.

        1. Advantages of every trained group, over pilots and commits together, are computed and frozen.
        2. Rows of groups with equal rewards, unscored and fully masked rollouts carry no gradient: left out.
        3. `round(ratio * fresh rows)` stored rollouts are drawn ("fresh-anchored": the fresh part is whole); where
           replay's unit is the group, `round(ratio * fresh groups)` stored groups. With the composition "pool", fresh
           rows enter the buffer first, and round((1 + ratio) * fresh rows) are drawn from it.
        4. The fresh rows enter the buffer; what is over-aged leaves it.

        Raises:
            ProtocolError: If the step is not complete, that is, `ask()` has not returned an empty list.
        """
        if not self._is_open or not self._is_complete:
            raise ProtocolError("the batch is not complete; ask and tell until ask() returns an empty list")
        groups = self.allocator.take(self.step)
        self._is_open = False
        carriers = self._freeze_advantages(groups)  # of a gradient
        fresh, replayed = self._compose(carriers)
        self._count_dry_prompts(bool(carriers))
        self._record_uses(fresh, replayed)

        rows = [Row(r, r.advantage, self.step - r.birth_step, r.purpose) for r in fresh]
        rows += [Row(r, r.advantage, self.step - r.birth_step, "replay") for r in replayed]
        inside = {id(rollout) for rollout in carriers}
        rest = [r for g in groups for r in g.rollouts if id(r) not in inside] if not self._drop_zero_variance else []
        return Batch(
            step=self.step,
            rows=tuple(rows),
            normalizer_rows=len(rows) + len(rest),
            normalizer_tokens=sum(rollout.loss_tokens for rollout in (*fresh, *replayed, *rest)),
            success_rate=success_rate([r.reward for r in self._told], self._success_threshold),
        )

    def _freeze_advantages(self, groups: list[Group]) -> list[Rollout]:
        """Set every rollout's advantage and return those that carry a gradient; settle the others in the ledger."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        stats = group_advantages(
            [rollout.reward for rollout in rollouts],
            [len(group.rollouts) for group in groups],
            scale=self._scale,
            ddof=self._ddof,
            epsilon=self._std_epsilon,
        )
        outcomes: dict[str, list[Rollout]] = {}
        means_P, stds_P = stats.means_P.tolist(), stats.stds_P.tolist()
        advantages_B, has_variance_P = stats.advantages_B.tolist(), stats.has_variance_P.tolist()
        i = 0
        for p, group in enumerate(groups):
            for rollout in group.rollouts:
                rollout.advantage, rollout.group_mean, rollout.group_std = (
                    advantages_B[i],
                    means_P[p],
                    stds_P[p],
                )
                i += 1
                if not rollout.is_scored:
                    outcome = "unscored"
                elif not has_variance_P[p]:
                    outcome = "zero_variance"
                elif not rollout.loss_tokens:
                    outcome = "truncated"
                else:
                    outcome = "trained"
                outcomes.setdefault(outcome, []).append(rollout)
        carriers = outcomes.pop("trained", [])
        for outcome, settled in outcomes.items():
            self.ledger.settle(settled, outcome)
        return carriers

    def _compose(self, fresh: list[Rollout]) -> tuple[list[Rollout], list[Rollout]]:
        """The batch's fresh and its replayed rollouts; the fresh ones enter the buffer."""
        if self.buffer is None:
            return fresh, []
        settings = self.buffer.settings
        fresh_units = len(fresh) if settings.unit == "rollout" else len({rollout.prompt_id for rollout in fresh})
        is_warm = self.step >= settings.warmup_steps
        if settings.composition == "pool" and is_warm:
            self.buffer.insert(fresh)
            wanted = math.floor((1 + settings.ratio) * fresh_units + 0.5)
            drawn = self.buffer.draw(wanted, self.step, self.rng)
            new = {id(rollout) for rollout in fresh}
            return [r for r in drawn if id(r) in new], [r for r in drawn if id(r) not in new]
        wanted = math.floor(settings.ratio * fresh_units + 0.5) if is_warm else 0
        replayed = self.buffer.draw(wanted, self.step, self.rng)
        self.buffer.insert(fresh)
        return fresh, replayed

    def _record_uses(self, fresh: list[Rollout], replayed: list[Rollout]) -> None:
        """Count what the batch trains on: a rollout is settled at its first use, and replayed from the second on."""
        for rollout in (*fresh, *replayed):
            rollout.num_uses += 1
        self.ledger.settle([r for r in (*fresh, *replayed) if r.num_uses == 1], "trained")
        self.ledger.record_replayed(self.step, [rollout for rollout in replayed if rollout.num_uses > 1])
        if self.buffer is not None:
            left = self.buffer.take_dropped_unused()  # some of this batch may have left at once
            self.ledger.settle([rollout for rollout in left if rollout.num_uses == 0], "aged_out")

    def _count_dry_prompts(self, has_gradient: bool) -> None:
        if has_gradient:
            self._dry_prompts, self._dry_rollouts = 0, [0, 0, 0]
            return
        self._dry_prompts += len({rollout.prompt_id for rollout in self._told})
        scored = [rollout.reward for rollout in self._told if rollout.is_scored]
        self._dry_rollouts[0] += len(scored)
        self._dry_rollouts[1] += sum(reward >= self._success_threshold for reward in scored)
        self._dry_rollouts[2] += sum(rollout.loss_tokens > 0 for rollout in self._told)

    @property
    def stop_reason(self) -> str | None:
        """Why the run should end now, with a checkpoint: a message for the user. None: go on."""
        if self.allocator.exhausted:
            return self.allocator.exhausted
        if not self._patience_prompts or self._dry_prompts < self._patience_prompts:
            return None
        scored, succeeded, with_loss = self._dry_rollouts
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
            f"the last {self._dry_prompts} prompts in a row gave no gradient "
            f"(patience_prompts is {self._patience_prompts}): {finding}"
        )

    def metrics(self) -> dict[str, float]:
        """Figures for the trainer's log: the ledger's totals, the allocator's and the buffer's state."""
        totals = self.ledger.totals()
        generated = totals["rollouts_generated"]
        figures = {name: float(value) for name, value in totals.items()}
        figures["useful_share"] = totals["rollouts_trained"] / generated if generated else 0.0
        figures |= self.allocator.metrics()
        if self.buffer is not None:
            figures |= {"buffer_rollouts": float(len(self.buffer)), "buffer_bytes": float(self.buffer.nbytes)}
        return figures

    def _position_of(self, prompt_id: PromptId) -> int:
        try:
            return self._position[prompt_id]
        except KeyError:
            raise RolloutError(
                f"prompt id {prompt_id!r} is unknown; the scheduler was built with {len(self.prompt_ids)} other ids"
            ) from None

    def _fingerprint(self) -> str:
        return hashlib.sha256("\n".join(map(repr, self.prompt_ids)).encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what follows: JSON-able values, and under "rollouts" the rollouts kept.

        Raises:
            ProtocolError: In the middle of a step.
        """
        if self._is_open:
            raise ProtocolError("a state can be saved between steps only; finish the step with batch()")
        waiting = self.allocator.waiting()
        kept = [rollout for group in waiting for rollout in group.rollouts]
        stored = self.buffer.rollouts if self.buffer is not None else []
        return {
            "format": STATE_FORMAT,
            "prompts_sha256": self._fingerprint(),
            "step": self.step,
            "rng": self.rng.bit_generator.state,
            "ledger": self.ledger.state_dict(),
            "pool": self.pool.state_dict(),
            "allocation": {"name": self.allocator.name, **self.allocator.state_dict()},
            "waiting": [[group.prompt, group.birth_step, len(group.rollouts)] for group in waiting],
            "dry_prompts": self._dry_prompts,
            "dry_rollouts": list(self._dry_rollouts),
            "num_stored": len(stored),
            "buffer": self.buffer.state_dict() if self.buffer is not None else None,
            "rollouts": kept + stored,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`: the same requests, draws and batches as the run that was not stopped.

        Raises:
            StateError: If the state is of a newer format, other prompts or another allocation.
        """
        if state.get("format") != STATE_FORMAT:
            raise StateError(
                f"the saved state has format {state.get('format')!r}, this version reads {STATE_FORMAT}; "
                "use the version of rollwise that wrote it"
            )
        if state["prompts_sha256"] != self._fingerprint():
            raise StateError(
                f"the saved state is of other prompts than the {len(self.prompt_ids)} of this run; resume with "
                "the data set, in the order, that the run was started with"
            )
        if state["allocation"]["name"] != self.allocator.name:
            raise StateError(
                f"the saved state is of allocation {state['allocation']['name']!r}, this run has "
                f"{self.allocator.name!r}; resume with the allocation that the run was started with"
            )
        rollouts = list(state["rollouts"])
        waiting, start = [], 0
        for prompt, birth_step, size in state["waiting"]:
            waiting.append(Group(prompt, birth_step, rollouts[start : start + size]))
            start += size
        stored = rollouts[start:]
        if len(stored) != state["num_stored"]:
            raise StateError(
                f"the saved state holds {len(rollouts)} rollouts where {start + state['num_stored']} belong"
            )
        buffer = self.buffer
        if buffer is not None and state["buffer"] is not None:
            buffer = ReplayBuffer.from_state(buffer.settings, state["buffer"], stored)
        elif buffer is not None:  # the run was without replay until now
            buffer = ReplayBuffer(buffer.settings)
        self.ledger.load_state_dict(state["ledger"])  # these two may refuse; nothing else is touched before
        self.pool.load_state_dict(state["pool"])
        self.step, self._is_open, self._requests = state["step"], False, []
        self.rng.bit_generator.state = state["rng"]
        self.allocator.restore(state["allocation"], waiting)
        self._dry_prompts, self._dry_rollouts = state["dry_prompts"], list(state["dry_rollouts"])
        self.buffer = buffer
