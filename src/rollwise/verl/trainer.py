"""verl's synchronous trainer on the rollout scheduler.

No method of verl's is copied. Where verl would take its batch from what was generated, `StepSampler` gives it the
scheduler's; the stages that follow are verl's, and what they leave is edited where the methods differ from plain GRPO.
"""

from __future__ import annotations

import rollwise.verl.version_check  # noqa: F401 - before anything of verl's

# isort: split

import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer

from rollwise.advantage import td_errors
from rollwise.diagnostics import StalenessMonitor, batch_figures
from rollwise.errors import ConfigError, RewardError, StateError
from rollwise.ledger import Ledger
from rollwise.prompts import prompt_buckets, prompt_ids, prompts_digest
from rollwise.replay.advice import idle_decay_advice, starvation_advice
from rollwise.rollout import Batch, PromptId, Request, Rollout, Row
from rollwise.scheduler import RolloutScheduler
from rollwise.verl import queue
from rollwise.verl.checks import (
    ROW_MEANS,
    bypasses_recomputing,
    check_config,
    is_critic,
    weighs_by_difference,
)
from rollwise.verl.queue import GENERATED, PLACEHOLDER, TRAINED
from rollwise.verl.rows import Place, sessions, stored_nbytes
from rollwise.verl.sampler import StepSampler
from rollwise.verl.settings import RollwiseSettings
from rollwise.verl.stores import DriverStore, PayloadStore, ShardedStore

logger = logging.getLogger(__name__)

_STATE_FOLDER = "rollwise"
#: What verl divides a group's rewards by is its std and this.
_STD_EPSILON = 1e-6


def settings_of(config: Any) -> RollwiseSettings:
    """The `rollwise:` block of a configuration.

    Raises:
        ConfigError: If it has a setting that there is none of, or one is out of its bounds.
    """
    block = OmegaConf.select(config, "rollwise")
    return RollwiseSettings.from_block(None if block is None else OmegaConf.to_container(block, resolve=True))


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
        self._placed: list[tuple[Row, Place, list[str]]] = []  # the step's rows, where they are, and their keys
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
        prompts, rollouts = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
        if len(self.train_dataset) < prompts:
            raise ConfigError(
                f"the data set has {len(self.train_dataset)} prompts, and data.train_batch_size is {prompts}; add "
                "prompts, or lower data.train_batch_size"
            )
        self._chooses_prompts = settings.allocation_name != "uniform"
        # Where verl's data loader chooses the prompts, a prompt's id is its place in the batch.
        ids: list[PromptId] = list(range(prompts))
        buckets = None
        if self._chooses_prompts:
            ids = prompt_ids(self._table, settings.prompt_id_column)
            if settings.allocation_name == "belief":
                buckets = prompt_buckets(self._table, settings.bucket_column, config.data.prompt_key)
        self._rows_of_prompts = {prompt_id: row for row, prompt_id in enumerate(ids)}
        is_grouped = config.algorithm.adv_estimator == "grpo" and rollouts > 1
        self.scheduler = RolloutScheduler(
            ids,
            allocation=settings.allocation_settings(prompts, rollouts, buckets),
            replay=settings.replay_settings(),
            seed=settings.seed,
            scale_rewards="group" if config.algorithm.get("norm_adv_by_std_in_grpo", True) else "none",
            std_epsilon=_STD_EPSILON,
            success_threshold=settings.success_threshold,
            drop_zero_variance=settings.drops_zero_variance,
            baseline="group" if is_grouped else "critic",
            patience_prompts=settings.patience_prompts,
        )

    @property
    def _table(self) -> Any:
        """The data set's columns.

        Raises:
            ConfigError: If it is of a class that has none.
        """
        table = getattr(self.train_dataset, "dataframe", None)
        if table is None:
            raise ConfigError(
                f"rollwise.allocation.name={self.settings.allocation_name!r} chooses prompts by their rows, and "
                f"{type(self.train_dataset).__name__} has no `dataframe`; use a data set class that derives from "
                "verl's RLHFDataset, or allocation uniform"
            )
        return table

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
        prompts = None if self._chooses_prompts else list(range(self.config.data.train_batch_size))
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
        batch = self._prompts(requests)
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

    def _prompts(self, requests: Sequence[Request]) -> Any:
        """The requests' prompts, as verl submits them."""
        if self._chooses_prompts:
            rows = [self._rows_of_prompts[request.prompt_id] for request in requests]
            examples = self.train_dataloader.collate_fn([self.train_dataset[row] for row in rows])
            self.train_dataloader_it = iter([examples])
            batch = self._fetch_one_gen_batch()
            tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        else:
            batch = self._next_train_batch()
        tu.assign_non_tensor_stack(batch, "__rollout_n__", [request.num_rollouts for request in requests])
        return batch

    def _as_rollouts(
        self, requests: Sequence[Request], uids: Sequence[str], found: Mapping[tuple[str, int], Sequence[str]]
    ) -> dict[tuple[str, int], Rollout]:
        """One rollout for each session that was asked for, in order."""
        keys = [key for session in found.values() for key in session]
        read = queue.get_as_far_as(keys, GENERATED, ("prompts", "response_mask"), "rm_scores")
        rows = dict(zip(keys, read, strict=True))
        stores_old = not bypasses_recomputing(self.config) and not weighs_by_difference(self.config)
        rollouts: dict[tuple[str, int], Rollout] = {}
        for uid, request in zip(uids, requests, strict=True):
            for session in range(request.num_rollouts):
                mine = [rows[key] for key in found.get((uid, session), ())]
                if not mine or "rm_scores" not in mine[-1]:
                    rollouts[uid, session] = Rollout(request.prompt_id, math.nan)
                    continue
                num_tokens = sum(int(row["response_mask"].sum()) for row in mine)
                sizes = [(len(row["prompts"]), len(row["response_mask"])) for row in mine]
                rollouts[uid, session] = Rollout(
                    request.prompt_id,
                    float(mine[-1]["rm_scores"].sum()),
                    num_tokens=num_tokens,
                    nbytes=stored_nbytes(
                        len(mine), sum(p for p, _ in sizes), sum(r for _, r in sizes), with_old_log_probs=stores_old
                    ),
                )
        self._check_rewards(list(rollouts.values()))
        return rollouts

    def _check_rewards(self, rollouts: Sequence[Rollout]) -> None:
        """Tell a reward function that is broken from one that fails for some rollouts."""
        num_unscored = sum(not rollout.is_scored for rollout in rollouts)
        if num_unscored == len(rollouts) and not self._has_worked and self.settings.is_active:
            raise RewardError(
                f"none of the first {len(rollouts)} rollouts has a reward; the log of verl's AgentLoopWorker says why "
                "(the reward function or the agent loop raises, or the reward is not a number)"
            )
        self._has_worked = True
        if num_unscored:
            logger.warning("%d of %d rollouts have no reward and are left unscored.", num_unscored, len(rollouts))

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
            (row, place, by_rollout[place.uid, place.session]) for row, place in zip(rows, places, strict=True)
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
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        multiple = dp_size * self._num_updates(actor)
        if not actor.use_dynamic_bsz:
            multiple *= math.lcm(actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu)
        if self._has_critic:
            critic = self.config.critic
            multiple = math.lcm(multiple, dp_size * self._num_updates(critic))
            if not critic.use_dynamic_bsz:
                sizes = critic.ppo_micro_batch_size_per_gpu, critic.get("forward_micro_batch_size_per_gpu") or 1
                multiple = math.lcm(multiple, dp_size * self._num_updates(critic) * math.lcm(*sizes))
        return multiple

    def _num_updates(self, model: Any) -> int:
        """Optimizer steps that a batch is cut into."""
        return max(1, int(self.config.data.train_batch_size) // int(model.ppo_mini_batch_size))

    @contextmanager
    def _mini_batches_of(self, model: Any, num_rows: int) -> Iterator[None]:
        """Make verl cut `num_rows` rows into as many mini-batches as it cuts a batch of its own."""
        rollout = self.config.actor_rollout_ref.rollout
        saved = model.ppo_mini_batch_size, rollout.n
        model.ppo_mini_batch_size, rollout.n = num_rows // self._num_updates(model), 1
        try:
            yield
        finally:
            model.ppo_mini_batch_size, rollout.n = saved

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
            self._weigh_advantages()
            self._feed_back_td_errors()
        else:
            self._freeze_advantages(batch.keys)
        return batch

    def _freeze_advantages(self, keys: Sequence[str]) -> None:
        """Replace verl's advantages, relative to whoever is in the batch, by those frozen with the whole group.

        verl's losses are linear in the advantage, so what their normaliser has too much or too little goes in there.
        """
        assert self._batch is not None
        scale = self._loss_scale(len(keys))
        values = {key: row.advantage * row.weight * scale for row, _, keys in self._placed for key in keys}
        self._put_advantages(keys, [values.get(key, 0.0) for key in keys])

    def _loss_scale(self, num_rows: int) -> float:
        """What verl's loss divides by, over what the scheduler wants it to divide by."""
        batch = self._batch
        assert batch is not None
        if self.config.actor_rollout_ref.actor.loss_agg_mode in ROW_MEANS:
            real_rows = sum(len(keys) for _, _, keys in self._placed)
            return num_rows * len(batch.rows) / (real_rows * batch.normalizer_rows)
        return sum(row.rollout.loss_tokens for row in batch.rows) / batch.normalizer_tokens

    def _put_advantages(self, keys: Sequence[str], values: Sequence[float]) -> None:
        masks = queue.get(keys, TRAINED, ("response_mask",))
        rows = [value * row["response_mask"].float() for value, row in zip(values, masks, strict=True)]
        queue.put(keys, [{"advantages": row, "returns": row} for row in rows])

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if not self.settings.is_active:
            return super()._update_actor(batch, metrics)
        if not batch.keys:
            return batch  # nothing carries a gradient: no optimizer step, whose momentum would move the weights
        with self._mini_batches_of(self.config.actor_rollout_ref.actor, len(batch.keys)):
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
        """Mean |TD error| over the loss tokens of each rollout placed."""
        keys = [key for _, _, keys in self._placed for key in keys]
        rows = iter(queue.get(keys, TRAINED, ("rm_scores", "values", "response_mask")))
        means = []
        for _, _, mine in self._placed:
            total, num_tokens = 0.0, 0
            for _ in mine:
                row = next(rows)
                mask_T = row["response_mask"].bool()
                errors_T = td_errors(row["rm_scores"][mask_T], row["values"][mask_T], self.config.algorithm.gamma)
                total, num_tokens = total + float(abs(errors_T).sum()), num_tokens + len(errors_T)
            means.append(total / max(num_tokens, 1))
        return means

    def _feed_back_td_errors(self) -> None:
        if self.scheduler.buffer is not None and self.scheduler.buffer.settings.priority == "td_error":
            self.scheduler.feedback(priorities=self._mean_td_errors())

    def _weigh_advantages(self) -> None:
        """Importance weights of the draw, where there are any."""
        weighted = [(keys, row.weight) for row, _, keys in self._placed if row.weight != 1.0]
        keys = [key for keys, _ in weighted for key in keys]
        if not keys:
            return
        weights = [weight for keys, weight in weighted for _ in keys]
        rows = queue.get(keys, TRAINED, ("advantages",))
        queue.put(keys, [{"advantages": row["advantages"] * w} for row, w in zip(rows, weights, strict=True)])

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if not self.settings.is_active:
            return super()._update_critic(batch, metrics)
        if not batch.keys:
            return batch
        with self._mini_batches_of(self.config.critic, len(batch.keys)):
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
        self._batch, self._step_rollouts = self.scheduler.batch(), len(rollouts)
        self._count_filtered(metrics)
        return rows, metrics

    def _count_filtered(self, metrics: Mapping[str, float]) -> None:
        """Count the groups that verl's own dynamic sampling has dropped; their tokens are not known here."""
        for name, outcome in (("evicted_samples", "zero_variance"), ("discarded_surplus_samples", "surplus")):
            num_groups = int(metrics.get(f"training/filter_groups/{name}", 0))
            num_rollouts = num_groups * self.config.actor_rollout_ref.rollout.n
            lost = [Rollout("", math.nan, purpose="resample", birth_step=self._step) for _ in range(num_rollouts)]
            self.ledger.record(lost)
            self.ledger.settle(lost, outcome)
            self._step_rollouts += num_rollouts

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

    def _checkpoint_folder(self) -> str:
        if self.config.trainer.resume_mode == "resume_path" and self._saved_step < 0:
            return str(self.config.trainer.resume_from_path)
        return os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")

    def _save_checkpoint(self) -> None:
        # Before super(), which says last of all that the checkpoint is there.
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}", _STATE_FOLDER)
        self._store.save(folder, self.scheduler.state_dict() | {"dataset": self._dataset_digest()})
        super()._save_checkpoint()
        self._saved_step = self.global_steps

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps:
            return
        folder = os.path.join(self._checkpoint_folder(), _STATE_FOLDER)
        if not self.settings.is_active and not os.path.isdir(folder):
            return  # a checkpoint of stock verl, which plain GRPO can go on from
        state = self._store.load(folder)
        if (saved := state.pop("dataset", None)) and (now := self._dataset_digest()) and saved != now:
            raise StateError(
                f"{folder} is of a run whose data set had other prompts, or the same in another order, and row numbers "
                "were their ids; resume with that data set, or begin runs whose data set may change with "
                "rollwise.prompt_id_column"
            )
        self.scheduler.load_state_dict(state)
        self._has_worked = True

    def _dataset_digest(self) -> str | None:
        """What row numbers stand for; None where they are no prompt ids."""
        if not self._chooses_prompts or self.settings.prompt_id_column is not None:
            return None
        return prompts_digest(self._table, self.config.data.prompt_key)
