"""verl's synchronous trainer on the rollout scheduler.

No method of verl's is copied. Where verl would take its batch from what was generated, `StepSampler` gives it the
scheduler's; the stages that follow are verl's, and what they leave is edited where the methods differ from plain GRPO.
"""

from __future__ import annotations

import rollwise.verl.version_check  # noqa: F401 - before anything of verl's

# isort: split

import logging
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.debug import marked_timer

from rollwise.diagnostics import StalenessMonitor, batch_figures
from rollwise.errors import StateError
from rollwise.ledger import Ledger
from rollwise.replay.advice import idle_decay_advice, starvation_advice
from rollwise.rollout import Batch, PromptId, Request, Rollout, Row
from rollwise.scheduler import RolloutScheduler
from rollwise.verl import advantages, queue
from rollwise.verl.advantages import Placed
from rollwise.verl.checks import bypasses_recomputing, check_config, is_critic, weighs_by_difference
from rollwise.verl.prompts import Prompts
from rollwise.verl.queue import GENERATED, PLACEHOLDER, TRAINED
from rollwise.verl.reshard import check_processes
from rollwise.verl.rows import Place, sessions
from rollwise.verl.sampler import StepSampler
from rollwise.verl.scoring import Sessions, as_rollouts, check_rewards, count_filtered
from rollwise.verl.settings import settings_of
from rollwise.verl.stores import DriverStore, PayloadStore, ShardedStore
from rollwise.verl.updates import batch_multiple, mini_batches_of

logger = logging.getLogger(__name__)

_STATE_FOLDER = "rollwise"
#: What verl divides a group's rewards by is its std and this.
_STD_EPSILON = 1e-6


class RollwiseTrainer(PPOTrainerSync):
    """verl's `PPOTrainerSync`, with the rollouts allocated and replayed as its `rollwise:` block says.

    Figures are logged under `rollwise/`. The scheduler's state is saved in the folder `rollwise` of each checkpoint.

    Attributes:
        scheduler: The scheduler, with its pool, buffer and generator.
        stop_reason: Why the run ended before its last step, or None.

    Raises:
        ConfigError: If block and configuration contradict each other, or the data set is smaller than a batch.
        InexactSettingError: If a setting of verl's would make replay or allocation inexact.
    """

    scheduler: RolloutScheduler
    total_training_steps: int
    global_steps: int
    _store: PayloadStore

    def __init__(self, config: Any) -> None:
        self.settings = settings_of(config)
        check_config(config, self.settings)
        super().__init__(config)
        self.stop_reason: str | None = None
        self._has_critic = is_critic(config)
        self._batch: Batch | None = None  # the step's; None with a critic until its values are known
        self._untold: list[Rollout] = []
        self._placed: list[Placed] = []  # the step's rows
        self._step_rollouts = 0
        self._saved_step = -1
        self._has_worked = False  # some reward has come
        self._staleness = StalenessMonitor(self.settings.ess_bound)
        self._has_advised: set[str] = set()

    # --- set-up -------------------------------------------------------------------------------------------------

    def _build_replay_buffer(self) -> StepSampler:
        sample = self._scheduled_rows if self.settings.is_active else self._stock_rows
        return StepSampler(super()._build_replay_buffer(), sample)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        config, settings = self.config, self.settings
        rollouts = config.actor_rollout_ref.rollout.n
        self._prompts = Prompts(self.train_dataset, config, settings)
        is_grouped = config.algorithm.adv_estimator == "grpo" and rollouts > 1
        self.scheduler = RolloutScheduler(
            self._prompts.ids,
            allocation=settings.allocation_settings(config.data.train_batch_size, rollouts, self._prompts.buckets),
            replay=settings.replay_settings(),
            seed=settings.seed,
            scale_rewards="group" if config.algorithm.get("norm_adv_by_std_in_grpo", True) else "none",
            std_epsilon=_STD_EPSILON,
            success_threshold=settings.success_threshold,
            drop_zero_variance=settings.drops_zero_variance,
            baseline="group" if is_grouped else "critic",
            patience_prompts=settings.patience_prompts,
        )

    def _setup(self) -> None:
        is_sharded = self.settings.payload_store == "sharded"
        self._store = ShardedStore(self.settings.payload_shards) if is_sharded else DriverStore()
        super()._setup()
        if (buffer := self.scheduler.buffer) is not None:
            self._advise("idle decay", lambda: idle_decay_advice(buffer.settings, self.total_training_steps))

    @property
    def ledger(self) -> Ledger:
        """What became of every generated rollout."""
        return self.scheduler.ledger

    @property
    def _step(self) -> int:
        """The step as the scheduler counts: verl's first is 1."""
        return self.global_steps - 1

    # --- generating ---------------------------------------------------------------------------------------------

    def prepare_step(self) -> dict[str, float]:
        """As in verl, or generate all that the step's batch takes."""
        if not self.settings.is_active:
            metrics: dict[str, float] = super().prepare_step()
            return metrics
        with marked_timer("gen", self.timing_raw):
            self._generate_batch()
        return {}

    def _generate_batch(self) -> None:
        """Ask, generate and tell until the step is complete. With a critic the last word waits for its values."""
        self._batch, self._untold, self._placed, self._step_rollouts = None, [], [], 0
        prompts = None if self._prompts.are_chosen else list(range(self.config.data.train_batch_size))
        while requests := self.scheduler.ask(self._step, prompts):
            rollouts = self._generate(requests)
            self._step_rollouts += len(rollouts)
            if self._has_critic:
                self._untold = rollouts
                return
            self.scheduler.tell(rollouts)
        self._batch = self.scheduler.batch()

    def _generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """Answer the requests; rollouts whose session failed are unscored."""
        batch = self._prompt_batch(requests)
        uids = list(batch["uid"])
        self._submit_batch_to_rollout(batch)
        found = sessions(self.replay_buffer.wait_for(uids, self.settings.poll_seconds))
        rollouts = self._as_rollouts(requests, uids, found)
        if self.settings.is_active:
            held = [(rollout, found[name]) for name, rollout in rollouts.items() if name in found]
            queue.clear([key for rollout, keys in held if not rollout.is_scored for key in keys], GENERATED)
            held = [(rollout, keys) for rollout, keys in held if rollout.is_scored]
            self._store.take([rollout for rollout, _ in held], [keys for _, keys in held])
        return list(rollouts.values())

    def _prompt_batch(self, requests: Sequence[Request]) -> Any:
        """The requests' prompts, as verl submits them."""
        if self._prompts.are_chosen:
            wanted = self._prompts.examples([request.prompt_id for request in requests])
            examples = self.train_dataloader.collate_fn(wanted)
            self.train_dataloader_it = iter([examples])
            batch = self._fetch_one_gen_batch()
            tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        else:
            batch = self._next_train_batch()
        tu.assign_non_tensor_stack(batch, "__rollout_n__", [request.num_rollouts for request in requests])
        return batch

    def _as_rollouts(
        self, requests: Sequence[Request], uids: Sequence[str], found: Sessions
    ) -> dict[tuple[str, int], Rollout]:
        """One rollout for each session that was asked for, in order."""
        stores_old = not bypasses_recomputing(self.config) and not weighs_by_difference(self.config)
        rollouts = as_rollouts(requests, uids, found, stores_old_log_probs=stores_old)
        check_rewards(list(rollouts.values()), has_worked=self._has_worked or not self.settings.is_active)
        self._has_worked = True
        return rollouts

    # --- the step's rows ----------------------------------------------------------------------------------------

    def _scheduled_rows(self, global_steps: int, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """What verl's stages work on: the batch's rows; with a critic, first those it shall value."""
        if self._batch is None:
            fresh = [Row(r, r.advantage, 0, r.purpose) for r in self._untold if r.payload is not None]
            return self._place(fresh), {}
        return self._place(self._batch.rows), {}

    def _place(self, rows: Sequence[Row]) -> KVBatchMeta:
        """Write rows for verl's stages. Fresh ones of a prompt form a group, replayed ones stand alone."""
        uids: dict[PromptId, str] = {}
        members: dict[str, int] = {}
        places = []
        for row in rows:
            uid = str(uuid.uuid4())
            if row.source != "replay":
                uid = uids.setdefault(row.rollout.prompt_id, uid)
            session = members[uid] = members.get(uid, -1) + 1
            version = self._step if self._batch is None else row.rollout.birth_step
            places.append(Place(uid, session, version, row.age_steps, row.advantage))
        keys, tags = self._store.write([row.rollout for row in rows], places)
        by_rollout = sessions(keys)
        self._placed = [
            Placed(row, place, by_rollout[place.uid, place.session]) for row, place in zip(rows, places, strict=True)
        ]
        return KVBatchMeta(partition_id=TRAINED, keys=keys, tags=tags)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> KVBatchMeta:
        if not self.settings.is_active:
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        if self._batch is None:
            self._tell_with_values(batch)
            extra_info, batch = batch.extra_info, self._place(self._batch.rows)  # type: ignore[attr-defined]
            batch.extra_info.update(extra_info)
        return super()._balance_batch(batch, metrics, *args, **kwargs) if batch.keys else batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Rows per process and optimizer step may be any number that micro-batches divide."""
        if not self.settings.is_active:
            return int(super()._get_required_batch_multiple(dp_size))
        return batch_multiple(self.config, dp_size)

    # --- verl's stages ------------------------------------------------------------------------------------------

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.settings.is_active and not batch.keys:
            return batch
        result = super()._compute_old_log_prob(batch, metrics)
        if self.settings.is_active and not bypasses_recomputing(self.config):
            self._settle_log_probs()
        return result

    def _settle_log_probs(self) -> None:
        """Put the behaviour policy's log-probs in the ratio, and tell the scheduler how stale the rows are."""
        actor = self.config.actor_rollout_ref.actor
        low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
        high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
        entries = self._store.settle_log_probs(
            [row.rollout for row, _, _ in self._placed],
            [place for _, place, _ in self._placed],
            replaces_old=not weighs_by_difference(self.config),
            clip=(1 - low, 1 + high),
        )
        self._staleness.add(entries)
        self.scheduler.feedback(staleness=entries)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._compute_ref_log_prob(batch, metrics) if batch.keys else batch

    def _compute_values(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._compute_values(batch, metrics) if batch.keys else batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if not self.settings.is_active:
            return super()._compute_advantage(batch, metrics)
        if not batch.keys:
            return batch
        batch = super()._compute_advantage(batch, metrics)
        if self._has_critic:
            advantages.weigh(self._placed)
            self._feed_back_td_errors()
        else:
            assert self._batch is not None
            mode = self.config.actor_rollout_ref.actor.loss_agg_mode
            advantages.freeze(self._placed, batch.keys, self._batch, mode)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if not self.settings.is_active:
            return super()._update_actor(batch, metrics)
        if not batch.keys:
            return batch  # nothing carries a gradient: no optimizer step, whose momentum would move the weights
        with mini_batches_of(self.config, self.config.actor_rollout_ref.actor, len(batch.keys)):
            return super()._update_actor(batch, metrics)

    # --- with a critic ------------------------------------------------------------------------------------------

    def _tell_with_values(self, batch: KVBatchMeta) -> None:
        """Value the fresh rows, tell the scheduler, and make the step's batch."""
        rollouts, self._untold = self._untold, []
        if self.scheduler.buffer is not None and self.scheduler.buffer.settings.priority == "td_error" and batch.keys:
            padded = super()._balance_batch(batch, {})
            super()._compute_values(padded, {})
            for (row, _, _), error in zip(self._placed, self._mean_td_errors(), strict=True):
                row.rollout.td_error = error
            batch = padded
        queue.clear(batch.keys, TRAINED)
        if rollouts:
            self.scheduler.tell(rollouts)
            while self.scheduler.ask():  # nothing more: the step is complete
                pass
        self._batch = self.scheduler.batch()

    def _mean_td_errors(self) -> list[float]:
        return advantages.mean_td_errors(self._placed, self.config.algorithm.gamma)

    def _feed_back_td_errors(self) -> None:
        if self.scheduler.buffer is not None and self.scheduler.buffer.settings.priority == "td_error":
            self.scheduler.feedback(priorities=self._mean_td_errors())

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if not self.settings.is_active:
            return super()._update_critic(batch, metrics)
        if not batch.keys:
            return batch
        with mini_batches_of(self.config, self.config.critic, len(batch.keys)):
            return super()._update_critic(batch, metrics)

    # --- off ----------------------------------------------------------------------------------------------------

    def _stock_rows(self, global_steps: int, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """verl's own rows, untouched, and counted."""
        rows, metrics = self.replay_buffer.stock.sample(global_steps, GENERATED, batch_size)
        found = sessions(rows.keys)
        uids = list(dict.fromkeys(uid for uid, _ in found))
        uids += [""] * (self.config.data.train_batch_size - len(uids))  # prompts all of whose sessions have failed
        requests = self.scheduler.ask(self._step, range(len(uids)))
        rollouts = list(self._as_rollouts(requests, uids, found).values())
        self.scheduler.tell(rollouts)
        while self.scheduler.ask():  # nothing more: the step is complete
            pass
        self._batch = self.scheduler.batch()
        num_filtered = count_filtered(metrics, self.config.actor_rollout_ref.rollout.n, self._step, self.ledger)
        self._step_rollouts = len(rollouts) + num_filtered
        return rows, metrics

    # --- logging and ending -------------------------------------------------------------------------------------

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if batch.keys:
            super()._compute_metrics(batch, metrics, *args, **kwargs)
        else:
            metrics["training/global_step"] = self.global_steps
            queue.write_placeholder(batch.partition_id)
            batch.keys.append(PLACEHOLDER)  # verl clears the batch's rows next, and of none it cannot
        assert self._batch is not None
        figures = batch_figures(self._batch, self.settings.success_threshold)
        figures |= self.scheduler.metrics() | self._staleness.figures()
        figures["step_rollouts_generated"] = float(self._step_rollouts)
        metrics.update({f"rollwise/{name}": value for name, value in figures.items()})
        self._advise("staleness", self._staleness.advice)
        if (buffer := self.scheduler.buffer) is not None:
            self._advise("starvation", lambda: starvation_advice(buffer))
        self._staleness.clear()

    def _log_rollout_data(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> None:
        if batch.keys != [PLACEHOLDER]:
            super()._log_rollout_data(batch, *args, **kwargs)

    def _advise(self, subject: str, advice: Callable[[], str | None]) -> None:
        """Say once what to change; what has been said is not looked for again."""
        if subject not in self._has_advised and (text := advice()) is not None:
            self._has_advised.add(subject)
            logger.warning("%s.", text[0].upper() + text[1:])

    def on_step_end(self) -> None:
        """As in verl; ends the run, with a checkpoint, once the scheduler says so."""
        self.stop_reason = self.scheduler.stop_reason or self._budget_spent()
        if self.stop_reason is not None and self.global_steps < self.total_training_steps:
            logger.warning("Training ends after step %d: %s.", self.global_steps, self.stop_reason)
            self.total_training_steps = self.global_steps
            if self._saved_step != self.global_steps:
                self._save_checkpoint()
        super().on_step_end()

    def _budget_spent(self) -> str | None:
        budget = self.settings.budget_rollouts
        if budget is None or (generated := sum(self.ledger.by_outcome().values())) < budget:
            return None
        return f"{generated:,} rollouts have been generated (rollwise.budget_rollouts is {budget:,})"

    def on_train_end(self) -> None:
        """As in verl; a run that has ended early is validated, if runs are."""
        super().on_train_end()
        if self.stop_reason is not None and self.config.trainer.test_freq > 0:
            self.logger.log(data=self._validate(), step=self.global_steps - 1)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _resumed_checkpoint(self) -> str | None:
        """The folder that the run goes on from; None: it begins anew."""
        settings = self.config.trainer
        if settings.resume_mode == "auto":
            found: str | None = find_latest_ckpt_path(os.path.abspath(settings.default_local_dir))
            return found
        return str(settings.resume_from_path) if settings.resume_mode == "resume_path" else None

    def _save_checkpoint(self) -> None:
        # Before super(), which says last of all that the checkpoint is there.
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}", _STATE_FOLDER)
        self._store.save(folder, self.scheduler.state_dict() | {"dataset": self._prompts.digest()})
        super()._save_checkpoint()
        self._saved_step = self.global_steps

    def _load_checkpoint(self) -> None:
        checkpoint = self._resumed_checkpoint()
        if checkpoint is not None and "model" in self.config.actor_rollout_ref.actor.checkpoint.load_contents:
            check_processes(Path(checkpoint), self.actor_rollout_wg.world_size)
        super()._load_checkpoint()
        if checkpoint is None:
            return
        folder = os.path.join(checkpoint, _STATE_FOLDER)
        if not self.settings.is_active and not os.path.isdir(folder):
            return  # a checkpoint of stock verl, which plain GRPO can go on from
        state = self._store.load(folder)
        if (saved := state.pop("dataset", None)) and (now := self._prompts.digest()) and saved != now:
            raise StateError(
                f"{folder} is of a run whose data set had other prompts, or the same in another order, and row numbers "
                "were their ids; resume with that data set, or begin runs whose data set may change with "
                "rollwise.prompt_id_column"
            )
        self.scheduler.load_state_dict(state)
        self._has_worked = True
