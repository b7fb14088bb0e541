"""`GRPOTrainer` on the rollout scheduler.

No method of TRL's is copied: `_generate_and_score_completions` calls super() for each round of requests, turns
what comes back into rollouts, and turns the scheduler's batch into the dict that TRL's loss reads.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers import ProcessorMixin
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from rollwise.diagnostics import batch_figures
from rollwise.errors import ConfigError, StateError
from rollwise.files import replacing
from rollwise.ledger import Ledger
from rollwise.prompts import prompt_buckets, prompt_ids, prompts_digest
from rollwise.replay.advice import idle_decay_advice, starvation_advice
from rollwise.rollout import Batch, PromptId, Request, Rollout
from rollwise.scheduler import RolloutScheduler
from rollwise.storage import load_state, save_state
from rollwise.trl.callbacks import EndAndSaveCallback
from rollwise.trl.checkpoints import newest_checkpoint
from rollwise.trl.checks import ROW_MEAN_LOSSES, check_dataset, check_eval_dataset, check_model
from rollwise.trl.config import RollwiseGRPOConfig
from rollwise.trl.corrections import correct
from rollwise.trl.held_out import HeldOut
from rollwise.trl.model_card import model_card_section
from rollwise.trl.packing import pack
from rollwise.trl.rewards import guard
from rollwise.trl.rows import (
    RowArrays,
    batch_to_rows,
    loss_tokens,
    neutral_template,
    row_nbytes,
    without_empty_images,
)
from rollwise.trl.staleness import AGE_KEY, StalenessProbe
from rollwise.trl.trajectories import (
    check_pictures_stayed,
    has_pictures,
    loss_lengths,
    suppress_image_tokens,
    with_trajectories,
)

logger = logging.getLogger(__name__)

_MODEL_CARD = "README.md"
_PROMPT_ID_COLUMN = "rollwise_prompt_id"
#: As `num_iterations` during a generate call: makes TRL compute the behaviour policy's log-probs itself.
_ALWAYS_COMPUTE_OLD_LOGPS = 1 << 40


class RollwiseGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer`, with the rollouts allocated and replayed as its `RollwiseGRPOConfig` says.

    Takes the arguments of `GRPOTrainer`, in the same order. Everything else (models, PEFT, vLLM, tools, callbacks,
    logging, checkpoints) is TRL's. Figures are logged under `rollwise/`, the share of held-out completions that
    succeed as `eval_rollwise/accuracy`, and that of each value of `eval_accuracy_column`.

    Attributes:
        scheduler: The scheduler, with its pool, buffer and generator.
        rollout_examples: The data set's rows that completions are being generated for, for a `rollout_func`.
        stop_reason: Why the run ended before its last step, or None.
        seconds_generation: Time spent generating so far.
        seconds_rollwise: Time spent in the library's own work so far: scheduler, buffer, packing.

    Raises:
        ConfigError: If `args` is a plain `GRPOConfig`, or the data set is empty or smaller than one batch.
        InexactSettingError: If model and settings together would make replay or allocation inexact.
    """

    _tag_names: ClassVar[list[str]] = [*GRPOTrainer._tag_names, "rollwise"]
    train_dataset: Any
    num_generations: int
    num_iterations: int
    tools: Any
    _signature_columns: list[str]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: RollwiseGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        *other_args: Any,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = RollwiseGRPOConfig(f"{name.rstrip('/').split('/')[-1]}-GRPO")
        if not isinstance(args, RollwiseGRPOConfig):
            raise ConfigError(
                f"args is a {type(args).__name__}; give a rollwise.trl.RollwiseGRPOConfig, which takes every field of "
                "GRPOConfig"
            )
        check_dataset(args, train_dataset)
        if reward_funcs is not None:
            functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
            reward_funcs = [guard(function, args.reward_timeout_seconds) for function in functions]
        with warnings.catch_warnings():
            # TRL calls it experimental at every start; every release in the supported range is tested with it.
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'", category=UserWarning)
            super().__init__(model, reward_funcs, args, train_dataset, *other_args, **kwargs)
        check_model(self)
        check_eval_dataset(args, self.eval_dataset)
        if self.rollout_func is not None and self._takes_images:
            suppress_image_tokens(self)

        self.rollout_examples: list[dict[str, Any]] = []
        self._declared_tools = self.tools
        self.stop_reason: str | None = None
        self.seconds_generation = 0.0
        self.seconds_rollwise = 0.0
        self._seconds_in_trl = 0.0
        self._last_rewards: torch.Tensor | None = None  # of the last generate call, over all processes
        self._last_lengths: list[int] = []  # in tokens, of its completions on this process
        self.held_out = HeldOut(args.success_threshold)
        self._has_rows = True
        self._loss_inputs: dict[str, Any] | None = None  # the micro-batch that TRL is computing the loss of
        self._template: RowArrays | None = None  # what neutral rows are made like
        self._staleness = StalenessProbe(args, self.accelerator)
        self._has_advised: set[str] = set()

        # A stream has no positions, and plain GRPO needs none: there a prompt's id is its place in the batch.
        self._has_prompt_ids = args.is_active and isinstance(self.train_dataset, Dataset)
        ids: list[PromptId] = list(range(args.train_prompts))
        buckets: list[int] | None = None
        if self._has_prompt_ids:
            ids = prompt_ids(self.train_dataset, args.prompt_id_column)
            self._rows_of_prompts = {prompt_id: row for row, prompt_id in enumerate(ids)}
            if args.allocation == "belief":
                buckets = prompt_buckets(self.train_dataset, args.belief_bucket_column)
            if args.allocation == "uniform":
                self.train_dataset = self.train_dataset.add_column(_PROMPT_ID_COLUMN, ids)
        self.scheduler = RolloutScheduler(
            ids,
            allocation=args.allocation_settings(buckets),
            replay=args.replay_settings(),
            seed=args.seed if args.data_seed is None else args.data_seed,
            scale_rewards=args.scale_rewards,
            success_threshold=args.success_threshold,
            drop_zero_variance=args.drops_zero_variance,
            patience_prompts=args.patience_prompts,
        )
        self.add_callback(EndAndSaveCallback(self))

    def td_errors(self, output: dict[str, Any]) -> torch.Tensor | None:
        """Mean TD error over the valid tokens of each completion, for `replay_priority="td_error"`.

        None here: GRPO has no critic. A subclass that has one overrides it.

        Args:
            output: TRL's batch of what this process has just generated.

        Returns:
            Shape (completions of this process,), in the unit of rewards.
        """
        return None

    @property
    def ledger(self) -> Ledger:
        """What became of every generated rollout."""
        return self.scheduler.ledger

    @property
    def _takes_images(self) -> bool:
        return isinstance(self.processing_class, ProcessorMixin)

    @property
    def _text_tokenizer(self) -> Any:
        return self.processing_class.tokenizer if self._takes_images else self.processing_class

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        # With remove_unused_columns, others would be removed.
        own = (_PROMPT_ID_COLUMN, self.args.eval_accuracy_column)
        self._signature_columns += [name for name in own if name and name not in self._signature_columns]

    def get_train_dataloader(self) -> Any:
        """As in TRL; a replay-only update comes with the prompts of the batch before it, none is passed over."""
        num_iterations = self.num_iterations
        self.num_iterations *= 1 + (self.args.replay_updates_per_fresh if self.args.is_active else 0)
        try:
            return super().get_train_dataloader()
        finally:
            self.num_iterations = num_iterations

    # --- generating ---------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            args = self.args
            self.rollout_examples = inputs
            output = super()._generate_and_score_completions(inputs)
            column = args.eval_accuracy_column
            values = [None if column is None else str(row[column]) for row in inputs]
            self.held_out.add(
                self._total_rewards(),
                gather_object(self._last_lengths),
                gather_object(values),
                self.num_generations_eval,
            )
            return output
        started, self._seconds_in_trl = time.perf_counter(), 0.0
        output = self._scheduled_batch(inputs) if self.args.is_active else self._stock_batch(inputs)
        self.seconds_rollwise += time.perf_counter() - started - self._seconds_in_trl
        if self.stop_reason is None and (reason := self.scheduler.stop_reason or self._budget_spent()):
            self.stop_reason = reason
            logger.warning("Training ends after step %d: %s.", self.state.global_step + 1, self.stop_reason)
        return output

    def _budget_spent(self) -> str | None:
        budget = self.args.budget_rollouts
        if budget is None or (generated := sum(self.ledger.by_outcome().values())) < budget:
            return None
        return f"{generated:,} rollouts have been generated (budget_rollouts is {budget:,})"

    def _scheduled_batch(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Ask, generate and tell until the step is complete; return its batch as TRL's."""
        prompts: list[PromptId] | None = None
        if self.args.allocation == "uniform":
            inputs, prompts = self._prompts_of(inputs)
        self._tell_staleness()
        rollouts_in_step = 0
        while requests := self.scheduler.ask(self.state.global_step, prompts):
            if prompts is None:
                rollouts = self._generate_requests(requests)
            else:
                with self._behaviour_logps(self.num_generations):
                    output = self._call_trl(inputs)
                rollouts = self._as_rollouts(output, [r.prompt_id for r in requests for _ in range(r.num_rollouts)])
            rollouts_in_step += len(rollouts)
            self.scheduler.tell(rollouts)
        batch = self.scheduler.batch()
        self._log_batch(batch, rollouts_in_step)
        return self._pack(batch)

    def begin(self, max_steps: int) -> None:
        """Check what can be checked once the run's length is known; called as training begins."""
        if (buffer := self.scheduler.buffer) is not None:
            self._advise("idle decay", lambda: idle_decay_advice(buffer.settings, max_steps))

    def _tell_staleness(self) -> None:
        """Pass on what the updates since the last batch showed; always before the scheduler's state is saved."""
        self.scheduler.feedback(staleness=self._staleness.take_entries())

    def _stock_batch(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's own batch, untouched, with its rollouts counted."""
        output: dict[str, Any] = self._call_trl(inputs)
        requests = self.scheduler.ask(self.state.global_step, range(self.args.train_prompts))
        rollouts = self._as_rollouts(
            output,
            [request.prompt_id for request in requests for _ in range(request.num_rollouts)],
            with_rows=False,
        )
        self.scheduler.tell(rollouts)
        while self.scheduler.ask():  # nothing more: the step is complete
            pass
        batch = self.scheduler.batch()
        self._log_batch(batch, len(rollouts))
        if (
            any(not rollout.is_scored for rollout in rollouts)
            and self.multi_objective_aggregation == "sum_then_normalize"
        ):
            # TRL releases differ in what they do with a missing reward; here it never becomes a 0.
            start = self.accelerator.process_index * len(inputs)
            local = [rollout.advantage for rollout in rollouts[start : start + len(inputs)]]
            output["advantages"] = torch.tensor(local, device=self.accelerator.device).nan_to_num(nan=0.0)
        return output

    def _prompts_of(self, inputs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[PromptId]]:
        """The loader's inputs as TRL would see them, and the ids of the prompts of all processes' inputs."""
        if not self._has_prompt_ids:
            return inputs, list(range(self.args.train_prompts))
        ids = gather_object([example[_PROMPT_ID_COLUMN] for example in inputs])
        inputs = [{key: value for key, value in example.items() if key != _PROMPT_ID_COLUMN} for example in inputs]
        return inputs, ids[:: self.num_generations]

    def _generate_requests(self, requests: Sequence[Request]) -> list[Rollout]:
        """Answer the requests in one generate call over all processes, which get equal numbers of rollouts."""
        ids = [request.prompt_id for request in requests for _ in range(request.num_rollouts)]
        world_size, rank = self.accelerator.num_processes, self.accelerator.process_index
        padded = ids + ids[:1] * (-len(ids) % world_size)
        share = len(padded) // world_size
        local = padded[rank * share : (rank + 1) * share]
        rows = self._rows_of_prompts
        examples = {prompt_id: self.train_dataset[rows[prompt_id]] for prompt_id in dict.fromkeys(local)}
        with self._behaviour_logps(num_generations=1):
            output = self._call_trl([dict(examples[prompt_id]) for prompt_id in local])
        rollouts = self._as_rollouts(output, padded)
        if surplus := rollouts[len(ids) :]:
            step = self.state.global_step
            self.ledger.record_padding(step, len(surplus), sum(rollout.num_tokens for rollout in surplus))
        return rollouts[: len(ids)]

    @contextmanager
    def _behaviour_logps(self, num_generations: int) -> Iterator[None]:
        saved = self.num_generations, self.num_iterations
        self.num_generations, self.num_iterations = num_generations, _ALWAYS_COMPUTE_OLD_LOGPS
        try:
            yield
        finally:
            self.num_generations, self.num_iterations = saved

    def _call_trl(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        started = time.perf_counter()
        self.rollout_examples = inputs
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self._seconds_in_trl += time.perf_counter() - started
        if self.rollout_func is not None and self.tools is not self._declared_tools:
            check_pictures_stayed(output)
        return output

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        if self.rollout_func is not None:
            self.tools = self._declared_tools
        generated = super()._generate(*args, **kwargs)
        self._last_lengths = loss_lengths(generated)
        if self.rollout_func is not None:
            if has_pictures(generated):
                self.tools = [with_trajectories]  # any will do, nobody calls it; see rollwise.trl.trajectories
            generated = with_trajectories(generated, self.processing_class)
        if self.model.training:
            self.seconds_generation += time.perf_counter() - started
        return generated

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(*args, **kwargs)
        # An infinite score says nothing about the completion; None and NaN are TRL's own "not scored by this one".
        rewards = torch.where(rewards.isinf().any(dim=1, keepdim=True), torch.nan, rewards)
        self._last_rewards = rewards
        return rewards

    def _total_rewards(self) -> list[float]:
        """Weighted reward of each completion of the last call, over all processes; NaN if none scored it."""
        assert self._last_rewards is not None
        rewards = self._last_rewards
        totals = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        return torch.where(rewards.isnan().all(dim=1), torch.nan, totals).double().tolist()

    def _as_rollouts(
        self, output: dict[str, Any], prompt_ids: Sequence[PromptId], *, with_rows: bool = True
    ) -> list[Rollout]:
        """The last call's completions of all processes; each process holds the rows it made."""
        rows: list[RowArrays] | None = None
        if with_rows:
            rows = batch_to_rows(output)
            self._template = neutral_template(rows)
            counts = [[loss_tokens(row), row_nbytes(row)] for row in rows]
        else:
            counts = [[num_tokens, 0] for num_tokens in output["completion_mask"].sum(1).tolist()]
        local = [[length, *count] for length, count in zip(self._last_lengths, counts, strict=True)]
        sizes = self.accelerator.gather(torch.tensor(local, device=self.accelerator.device)).tolist()
        local_errors = self.td_errors(output) if with_rows else None
        errors = [math.nan] * len(sizes)
        if local_errors is not None:
            errors = self.accelerator.gather(local_errors.detach().to(self.accelerator.device)).double().tolist()
        share = len(local)
        rank = self.accelerator.process_index
        return [
            Rollout(
                prompt_id=prompt_id,
                reward=reward,
                payload=rows[i - rank * share] if rows is not None and i // share == rank else None,
                num_tokens=num_tokens,
                num_loss_tokens=num_loss_tokens,
                nbytes=nbytes,
                owner=i // share,
                td_error=td_error,
            )
            for i, (prompt_id, reward, (num_tokens, num_loss_tokens, nbytes), td_error) in enumerate(
                zip(prompt_ids, self._total_rewards(), sizes, errors, strict=True)
            )
        ]

    # --- training -----------------------------------------------------------------------------------------------

    def _pack(self, batch: Batch) -> dict[str, Any]:
        self._has_rows = bool(batch.rows)
        return pack(
            batch,
            accelerator=self.accelerator,
            num_pieces=self.args.steps_per_generation,
            is_row_mean=self.loss_type in ROW_MEAN_LOSSES,
            pad_token_id=self._text_tokenizer.pad_token_id,
            pad_to_multiple_of=getattr(self, "pad_to_multiple_of", None),
            per_sequence_ratio=str(getattr(self, "vllm_importance_sampling_mode", "")).startswith("sequence"),
            template=self._template,
        )

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in TRL; a step that has nothing to train on leaves the weights alone."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        generate_every = self.args.steps_per_generation * self.num_iterations
        if not self._has_rows and generate_every % self.args.gradient_accumulation_steps == 0:
            # Without gradients the optimizer skips every parameter; zero gradients would still move them.
            self.model.zero_grad(set_to_none=True)
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._staleness.logps_BT = result[0]
        if self._loss_inputs is not None:  # TRL reads what is corrected here after this forward pass
            correct(self._loss_inputs, result[0], self.args)
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._loss_inputs = dict(without_empty_images(inputs))
        try:
            loss: torch.Tensor = super()._compute_loss(model, self._loss_inputs)
        finally:
            self._loss_inputs = None
        if AGE_KEY in inputs:
            started = time.perf_counter()
            self._staleness.observe(inputs)
            self.seconds_rollwise += time.perf_counter() - started
        return loss

    # --- logging ------------------------------------------------------------------------------------------------

    def _log_batch(self, batch: Batch, num_generated: int) -> None:
        figures = batch_figures(batch, self.args.success_threshold)
        figures["step_rollouts_generated"] = float(num_generated)
        for name, value in figures.items():
            self._metrics["train"][f"rollwise/{name}"].append(value)

    def _advise(self, subject: str, advice: Callable[[], str | None]) -> None:
        """Say once what to change; what has been said is not looked for again."""
        if subject not in self._has_advised and (text := advice()) is not None:
            self._has_advised.add(subject)
            logger.warning("%s.", text[0].upper() + text[1:])

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in TRL, with the scheduler's figures."""
        if self.model.training:
            self._advise("staleness", self._staleness.advice)
            if (buffer := self.scheduler.buffer) is not None:
                self._advise("starvation", lambda: starvation_advice(buffer))
            for name, value in (self.scheduler.metrics() | self._staleness.take_figures()).items():
                self._metrics["train"][f"rollwise/{name}"] = [value]
        else:
            for name, value in self.held_out.take().items():
                self._metrics["eval"][f"rollwise/{name}"] = [value]
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in TRL; what it returns has the figures under `rollwise/` too, which TRL 1.0 logs and does not return."""
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        logged = self.state.log_history[-1] if self.state.log_history else {}
        return {name: value for name, value in logged.items() if "_rollwise/" in name} | metrics

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Before super(), which may delete the last checkpoint: there is always one whole state on disk.
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._tell_staleness()
        save_state(
            os.path.join(self._get_output_dir(trial=trial), name),
            self.scheduler.state_dict() | {"dataset": self._dataset_digest},
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )
        super()._save_checkpoint(model, trial)  # writes the model card too, beside the checkpoints
        card = Path(self.args.output_dir) / _MODEL_CARD
        if self.is_world_process_zero() and card.is_file():
            shutil.copyfile(card, os.path.join(self._get_output_dir(trial=trial), name, _MODEL_CARD))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As in TRL, with the run's settings, what it spent and what it spared, and the papers of its methods."""
        super().create_model_card(*args, **kwargs)
        path = Path(self.args.output_dir) / _MODEL_CARD
        if self.is_world_process_zero():
            section = model_card_section(self.args, self.ledger, self.state.global_step)
            with replacing(path) as partial:
                partial.write_text(path.read_text(encoding="utf-8").rstrip() + "\n" + section, encoding="utf-8")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in TRL; a resumed run goes on with the scheduler's saved state.

        Raises:
            StateError: If the checkpoint's state is missing, damaged or of another run.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ConfigError(f"{self.args.output_dir} holds no whole checkpoint to resume from; start a new run")
        if resume_from_checkpoint:
            self._load_scheduler(str(resume_from_checkpoint))
        return super().train(resume_from_checkpoint or None, *args, **kwargs)

    @cached_property
    def _dataset_digest(self) -> str | None:
        """What the data set's row numbers stand for; None where there are no row numbers."""
        if not self._has_prompt_ids or self.args.prompt_id_column is not None:
            return None
        return prompts_digest(self.train_dataset)

    def _load_scheduler(self, checkpoint: str) -> None:
        if not self.args.is_active and not list(Path(checkpoint).glob("rollwise-*.arrow")):
            return  # a checkpoint of the stock trainer, which plain GRPO can go on from
        state = load_state(checkpoint, rank=self.accelerator.process_index, world_size=self.accelerator.num_processes)
        if (saved := state.pop("dataset", None)) and (now := self._dataset_digest) and saved != now:
            raise StateError(
                f"{checkpoint} is of a run whose train_dataset had other prompts, or the same in another order, and "
                "row numbers were their ids; resume with that data set, or begin runs whose data set may change with "
                "prompt_id_column"
            )
        self.scheduler.load_state_dict(state)
