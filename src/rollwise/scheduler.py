"""The rollout scheduler: which prompts get rollouts, and which rollouts are trained on. Read this first.

The scheduler never calls a model. Every trainer integration, the simulator and the tests are these few lines:

    scheduler = RolloutScheduler(prompt_ids, allocation=PilotCommit(...), replay=Replay(...), seed=0)
    while requests := scheduler.ask():          # what to generate next; empty once the batch is complete
        scheduler.tell(generate(requests))      # rollouts, in the order they were asked for
    batch = scheduler.batch()                   # fresh rows, then replayed ones
    update(batch)
    scheduler.feedback(...)                     # optional: how stale the rows were, new priorities
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from rollwise.advantage import Scale, check_settings, freeze_advantages, success_rate, without_baseline
from rollwise.allocation import Allocation, Allocator, PromptPool, Uniform
from rollwise.diagnostics import as_entries
from rollwise.errors import ConfigError, ProtocolError, RolloutError, StateError
from rollwise.ledger import Ledger
from rollwise.patience import Patience
from rollwise.prompt_ids import PromptIds, moved
from rollwise.replay import Clock, Replay, ReplayBuffer
from rollwise.replay.composition import Composition, compose, num_units, replay_only
from rollwise.replay.freshness import AutoTau, KLClock
from rollwise.replay.settings import AUTO
from rollwise.rollout import Allotment, Batch, Group, PromptId, Request, Rollout, Row

STATE_FORMAT = 2


def _as_reward(value: Any) -> float:
    """Reward functions also return None, bools, and scalars of numpy or torch."""
    return math.nan if value is None else float(value)


class RolloutScheduler:
    """Joins allocation and replay behind `ask`, `tell` and `batch`.

    Args:
        prompt_ids: A stable, unique id per prompt.
        allocation: Who gets rollouts; settings from `rollwise.allocation`.
        replay: What is used again; None, or nothing turned on in it: nothing.
        seed: Seed of the one generator behind all decisions.
        scale_rewards: See `rollwise.advantage.group_advantages`.
        ddof: See `rollwise.advantage.group_advantages`.
        std_epsilon: `epsilon` of `rollwise.advantage.group_advantages`.
        success_threshold: A rollout succeeds if its reward is at least this; for the success rate reported.
        drop_zero_variance: Whether rollouts without a gradient (of groups with equal rewards, unscored, fully
            masked) also leave the loss normaliser. They are never among a batch's rows; the question is what the
            loss is divided by. True, as in the methods' papers, makes the gradient larger by about
            1 / (1 - their share). False divides as plain GRPO does.
        baseline: What advantages are relative to: the rollout's "group", or a "critic" of the trainer's, which computes
            them at each use; then no rollout is left out for its group's sake.
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
        baseline: Literal["group", "critic"] = "group",
        patience_prompts: int = 1000,
    ) -> None:
        self._ids = PromptIds(prompt_ids)
        check_settings(scale_rewards, ddof, std_epsilon)
        self._scale: Scale = scale_rewards
        self._ddof = ddof
        self._std_epsilon = std_epsilon
        self._success_threshold = success_threshold
        self._drop_zero_variance = drop_zero_variance
        if baseline not in ("group", "critic"):
            raise ConfigError(f"baseline is {baseline!r}; it must be 'group' or 'critic'")
        self._has_critic = baseline == "critic"
        if isinstance(allocation, Uniform) and allocation.num_rollouts < 2 and not self._has_critic:
            raise ConfigError(
                f"num_rollouts is {allocation.num_rollouts}; a group needs at least 2 rollouts to have an advantage"
            )
        self._patience = Patience(patience_prompts, success_threshold)

        self.rng = np.random.default_rng(seed)
        self.ledger = Ledger()
        self.pool = PromptPool(len(self.prompt_ids), self.rng)
        self.allocator: Allocator = (allocation or Uniform()).build(self.pool, self.rng, self.ledger)
        self.buffer = ReplayBuffer(replay) if replay is not None and replay.is_on else None

        self.step = -1  # the step that is open, or was last closed
        self._is_open = False
        self._is_complete = False  # ask() has nothing more for this step
        self._requests: list[Allotment] = []  # asked for and not told yet
        self._told: list[Rollout] = []  # in this step
        self._trained: list[Rollout] = []  # in the last batch
        self._turnover = 0.0  # share of the buffer that entered with the last batch

        self._version = -1  # of the policy: batches of rollouts begun, less 1
        self._kl_clock, self._auto_tau = KLClock(), AutoTau()
        self._is_replay_only = False  # the step that is open
        self._replay_updates_due = 0  # before the next one with fresh rows
        self._fresh_units = 0  # of the last batch that had some

    @property
    def prompt_ids(self) -> list[PromptId]:
        """The ids of the prompts, in order."""
        return self._ids.ids

    def ask(self, step: int | None = None, prompts: Sequence[PromptId] | None = None) -> list[Request]:
        """What to generate next. Empty once the step's batch is complete; at once where it is a replay-only one.

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
            raise ProtocolError(
                f"step {step} is before step {self.step}, which has been trained on; steps may not go back"
            )
        positions = None if prompts is None else [self._ids.position(prompt_id) for prompt_id in prompts]
        is_replay_only = self._is_replay_only if self._is_open else self._is_replay_due(step)
        self._requests = [] if is_replay_only else self.allocator.ask(step, positions)
        if not self._is_open:
            if self.step >= 0:
                self._kl_clock.observe(self.step, as_entries(()))  # if nobody has said anything about it
            self._version += not is_replay_only
            self._is_replay_only = is_replay_only
            self.step, self._is_open, self._told = step, True, []
        self._is_complete = not self._requests
        return [Request(self.prompt_ids[r.prompt], r.num_rollouts, r.purpose) for r in self._requests]

    def _is_replay_due(self, step: int) -> bool:
        if self.buffer is None or not self._replay_updates_due or step < self.buffer.settings.warmup_steps:
            return False
        self.buffer.evict(self._now(step))
        return len(self.buffer) > 0

    def _now(self, step: int) -> Clock:
        return Clock(step, self._version, self._kl_clock.reading)

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
                rollout.birth_step, rollout.birth_version, rollout.birth_kl = self._now(self.step)
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

        A replay-only step has no fresh rows: as many units are drawn as the last fresh batch had.

        Raises:
            ProtocolError: If the step is not complete, that is, `ask()` has not returned an empty list.
        """
        if not self._is_open or not self._is_complete:
            raise ProtocolError("the batch is not complete; ask and tell until ask() returns an empty list")
        groups = [] if self._is_replay_only else self.allocator.take(self.step)
        self._is_open = False
        carriers = self._freeze_advantages(groups)  # of a gradient
        composition = self._compose(carriers)
        self._patience.observe(self._told, bool(carriers))
        fresh, replayed = composition.fresh, composition.replayed
        self._trained = [*fresh, *replayed]
        self._record_uses(replayed)

        sources = [rollout.purpose for rollout in fresh] + ["replay"] * len(replayed)
        rows = [
            Row(rollout, rollout.advantage, self.step - rollout.birth_step, source, weight)
            for rollout, source, weight in zip(self._trained, sources, composition.weights, strict=True)
        ]
        inside = {id(rollout) for rollout in carriers}
        rest = [r for g in groups for r in g.rollouts if id(r) not in inside] if not self._drop_zero_variance else []
        return Batch(
            step=self.step,
            rows=tuple(rows),
            normalizer_rows=len(rows) + len(rest),
            normalizer_tokens=sum(rollout.loss_tokens for rollout in (*self._trained, *rest)),
            success_rate=success_rate([r.reward for r in self._told], self._success_threshold),
        )

    def _freeze_advantages(self, groups: list[Group]) -> list[Rollout]:
        """Set every rollout's advantage and return those that carry a gradient; settle the others in the ledger."""
        if self._has_critic:
            outcomes = without_baseline(groups)
        else:
            outcomes = freeze_advantages(groups, scale=self._scale, ddof=self._ddof, epsilon=self._std_epsilon)
        carriers = outcomes.pop("trained", [])
        for outcome, settled in outcomes.items():
            self.ledger.settle(settled, outcome)
        return carriers

    def _compose(self, fresh: list[Rollout]) -> Composition:
        if self.buffer is None:
            return Composition(fresh)
        now, entered = self._now(self.step), self.buffer.num_entered
        if self._is_replay_only:
            self._replay_updates_due -= 1
            composition = replay_only(self.buffer, self._fresh_units, now, self.rng)
        else:
            self._replay_updates_due = self.buffer.settings.updates_per_fresh
            self._fresh_units = num_units(self.buffer, fresh) or self._fresh_units
            composition = compose(self.buffer, fresh, now, self.rng)
        self._turnover = (self.buffer.num_entered - entered) / max(len(self.buffer), 1)
        return composition

    def _record_uses(self, replayed: Sequence[Rollout]) -> None:
        """Count what the batch trains on: a rollout is settled at its first use, and replayed from the second on."""
        for rollout in self._trained:
            rollout.num_uses += 1
        self.ledger.settle([rollout for rollout in self._trained if rollout.num_uses == 1], "trained")
        self.ledger.record_replayed(self.step, [rollout for rollout in replayed if rollout.num_uses > 1])
        if self.buffer is not None:
            left = self.buffer.take_dropped_unused()  # some of this batch may have left at once
            self.ledger.settle([rollout for rollout in left if rollout.num_uses == 0], "aged_out")

    def feedback(self, *, staleness: ArrayLike | None = None, priorities: ArrayLike | None = None) -> None:
        """Say how the last batch did, before the next `ask()` and before the state is saved.

        Does nothing without replay. Where there are several processes, all must say the same.

        Args:
            staleness: How far each row's policy was from its behaviour policy, shape (B, 7), as
                `rollwise.diagnostics.row_entries` makes it; any rows in any order, in one call or several. For the
                clock of cumulative KL and for `decay_tau_steps="auto"`.
            priorities: New priorities of the batch's rows, at least 0, shape (rows,), in their order: in place of what
                `Replay.priority` gave them (for example new TD errors). NaN: as it was.

        Raises:
            ProtocolError: In the middle of a step.
            RolloutError: If the number of priorities is not the batch's, or one is negative or infinite.
        """
        if self._is_open:
            raise ProtocolError("feedback() is about the last batch; call it between batch() and the next ask()")
        if self.buffer is None:
            return
        if priorities is not None:
            self.buffer.set_priorities(self._trained, priorities)
        if staleness is not None:
            entries_B = as_entries(staleness)
            self._kl_clock.observe(self.step, entries_B)
            if self.buffer.settings.decay_tau_steps == AUTO and self._auto_tau.observe(entries_B):
                self.buffer.set_decay_tau_steps(self._auto_tau.tau_steps)

    @property
    def stop_reason(self) -> str | None:
        """Why the run should end now, with a checkpoint: a message for the user. None: go on."""
        return self.allocator.exhausted or self._patience.stop_reason

    def metrics(self) -> dict[str, float]:
        """Figures for the trainer's log: the ledger's totals, the allocator's and the buffer's state."""
        totals = self.ledger.totals()
        generated = totals["rollouts_generated"]
        figures = {name: float(value) for name, value in totals.items()}
        figures["useful_share"] = totals["rollouts_trained"] / generated if generated else 0.0
        figures |= self.allocator.metrics()
        if self.buffer is not None:
            figures |= {"buffer_rollouts": float(len(self.buffer)), "buffer_bytes": float(self.buffer.nbytes)}
            figures |= {"buffer_turnover": self._turnover, "cumulative_kl": self._kl_clock.reading}
            if self.buffer.decay_tau_steps is not None:
                figures["decay_tau_steps"] = self.buffer.decay_tau_steps
        return figures

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
            "prompt_ids": self._ids.state(),
            "step": self.step,
            "rng": self.rng.bit_generator.state,
            "ledger": self.ledger.state_dict(),
            "pool": self.pool.state_dict(),
            "allocation": {"name": self.allocator.name, **self.allocator.state_dict()},
            "waiting": [[group.prompt, group.birth_step, len(group.rollouts)] for group in waiting],
            "patience": self._patience.state_dict(),
            "version": self._version,
            "kl_clock": self._kl_clock.state_dict(),
            "auto_tau": self._auto_tau.state_dict(),
            "replay_updates_due": self._replay_updates_due,
            "fresh_units": self._fresh_units,
            "num_stored": len(stored),
            "buffer": self.buffer.state_dict() if self.buffer is not None else None,
            "rollouts": kept + stored,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`: the same requests, draws and batches as the run that was not stopped.

        The prompts may have been reordered, and others added, which join the epoch that is under way.

        Raises:
            StateError: If the state is of a newer format or another allocation, or prompts of it have vanished.
        """
        if state.get("format") != STATE_FORMAT:
            raise StateError(
                f"the saved state has format {state.get('format')!r}, this version reads {STATE_FORMAT}; "
                "use the version of rollwise that wrote it"
            )
        positions = self._ids.positions_of(state["prompt_ids"])
        if positions is not None:
            state = moved(state, positions)
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
                f"the saved state holds {len(rollouts)} rollouts where {start + state['num_stored']} belong; "
                "resume from an earlier checkpoint"
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
        if positions is not None:
            self.pool.add(sorted(set(range(len(self.prompt_ids))) - set(positions)))
        self.allocator.restore(state["allocation"], waiting)
        self._patience.load_state_dict(state["patience"])
        self._version = state["version"]
        self._kl_clock.load_state_dict(state["kl_clock"])
        self._auto_tau.load_state_dict(state["auto_tau"])
        self._replay_updates_due, self._fresh_units = state["replay_updates_due"], state["fresh_units"]
        self.buffer, self._trained = buffer, []
