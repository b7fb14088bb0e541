"""verl's trainer with Rollwise in one process, for what would need many real runs: no Ray, no TransferQueue, no FSDP.

The trainer's stages, its dataset, its padding and its losses are verl's. The queue is a dict here, the worker group a
model with a plain optimizer, the agent loop a loop.
"""

import json
import types
from pathlib import Path

import torch
from hydra import compose, initialize_config_module
from launch import overrides
from real import pictures
from real.samples import sample
from transfer_queue import KVBatchMeta
from transformers import AutoModelForCausalLM
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1 import replay_buffer, trainer_base
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl_on_cpu import recording
from verl_on_cpu.reward import compute_score

from rollwise.verl import queue as rollwise_queue
from rollwise.verl.stores import DriverStore
from rollwise.verl.trainer import RollwiseTrainer


class Queue(types.ModuleType):
    """TransferQueue's key-value interface."""

    def __init__(self):
        super().__init__("transfer_queue")
        self.rows, self.tags = {}, {}

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        for i, key in enumerate(keys):
            row = self.rows.setdefault(partition_id, {}).setdefault(key, {})
            for name in fields.keys() if fields is not None else ():
                row[name] = fields[name][i] if isinstance(fields[name], torch.Tensor) else fields.get(name)[i]
            self.tags.setdefault(partition_id, {}).setdefault(key, {}).update(tags[i] if tags else {})
        return KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=[self.tags[partition_id][k] for k in keys])

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        rows = [self.rows[partition_id][key] for key in keys]
        names = set.intersection(*(set(row) for row in rows))
        chosen = [name for name in (select_fields or sorted(names)) if name in names]
        data = list_of_dict_to_tensordict([{name: row[name] for name in chosen} for row in rows])
        for name in chosen:
            if isinstance(rows[0][name], torch.Tensor):
                data[name] = torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)
        return data

    def kv_list(self, partition_id=None):
        return {partition: {key: dict(tag) for key, tag in tags.items()} for partition, tags in self.tags.items()}

    def kv_clear(self, keys, partition_id):
        for key in keys:
            self.rows.get(partition_id, {}).pop(key, None)
            self.tags.get(partition_id, {}).pop(key, None)


class Actor:
    """The worker group: one model, plain gradient descent, and the gradients it was given."""

    def __init__(self, queue, model, config):
        self._dispatch_info = {"actor": [0]}
        self._queue, self.model, self.gradients = queue, model, []
        self._config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.rows_per_update = []

    def _log_probs(self, row):
        """Of every token of a row but the first, as verl's engine gives them: shifted by one to the left."""
        inputs = {"input_ids": row["input_ids"][None]}
        if row["position_ids"].dim() == 2:
            media = row["multi_modal_inputs"]
            inputs |= {"position_ids": row["position_ids"][:, None]} | getattr(media, "data", media)
        logits = self.model(**inputs).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, row["input_ids"][1:, None])[:, 0]

    @torch.no_grad()
    def compute_log_prob(self, meta):
        rows = [self._queue.rows[meta.partition_id][key] for key in meta.keys]
        for row in rows:
            row["log_probs"] = torch.cat([self._log_probs(row), torch.zeros(1)])
            row["entropy"] = torch.zeros_like(row["log_probs"])
        return meta

    def update_actor(self, meta):
        size = meta.extra_info["mini_batch_size"]
        assert len(meta.keys) % size == 0
        for start in range(0, len(meta.keys), size):
            self._update(meta.keys[start : start + size], meta)
        return {"metrics": {"mfu": [0.0], "grad_norm": [0.0]}}

    def _update(self, keys, meta):
        rows = [self._queue.rows[meta.partition_id][key] for key in keys]
        self.rows_per_update.append(len(rows))
        pad = lambda name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)  # noqa: E731
        for row in rows:
            length = len(row["responses"])
            row["now"] = self._log_probs(row)[-length:]
        self._config.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=int(sum(row["loss_mask"].sum() for row in rows)),
            global_batch_size=meta.extra_info["global_batch_size"],
            loss_scale_factor=self._config.loss_scale_factor,
        )
        weights = pad("rollout_is_weights") if "rollout_is_weights" in rows[0] else None
        self.model.zero_grad()
        loss, _ = get_policy_loss_fn(self._config.policy_loss.loss_mode)(
            old_log_prob=pad("old_log_probs"),
            log_prob=pad("now"),
            advantages=pad("advantages"),
            response_mask=pad("response_mask").bool(),
            loss_agg_mode=self._config.loss_agg_mode,
            config=self._config,
            rollout_is_weights=weights,
        )
        loss.backward()
        gradient = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.gradients.append(gradient)
        norm = torch.sqrt(sum(g.pow(2).sum() for g in gradient.values()))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in gradient:
                    parameter -= 0.02 * gradient[name] / norm
        for row in rows:
            del row["now"]


class Agent:
    """The agent loop: samples, scores, and writes rows as verl's does."""

    def __init__(self, trainer, reward, rows_per_session):
        self._trainer, self._reward, self._rows_per_session = trainer, reward, rows_per_session
        self.num_completions, self._counts = 0, {}

    def _prompt_of(self, text):
        """Token ids of a prompt, and its images."""
        return self._trainer.tokenizer(text).input_ids, {}

    def _positions(self, tokens, media):
        return torch.arange(len(tokens))

    def _sampling(self):
        return {}

    def generate_sequences(self, batch):
        trainer, queue = self._trainer, self._trainer.queue
        version = trainer.global_steps - 1
        for i, uid in enumerate(batch["uid"]):
            text = batch["raw_prompt"][i][0]["content"]
            for session in range(batch["__rollout_n__"][i]):
                self.num_completions += 1
                self._session(queue, uid, session, text, batch["reward_model"][i]["ground_truth"], version)
            queue.kv_batch_put([uid], "train", tags=[{"status": "finished"}])

    def _session(self, queue, uid, session, text, answer, version):
        tokenizer, config = self._trainer.tokenizer, self._trainer.config
        rows = []
        for _ in range(self._rows_per_session):
            prompt, media = self._prompt_of(text)
            key = (version, text)
            self._counts[key] = count = self._counts.get(key, 0) + 1
            model, limit = self._trainer.actor_rollout_wg.model, config.data.max_response_length
            tokens, log_probs = sample(model, prompt, limit, (prompt, version, count), **self._sampling())
            rows.append((prompt, tokens, log_probs, media))
        reward = self._reward("", tokenizer.decode(rows[-1][1], skip_special_tokens=True), answer)["score"]
        fields, keys = [], []
        for index, (prompt, tokens, log_probs, media) in enumerate(rows):
            scores = torch.zeros(len(tokens))
            scores[-1] = reward
            fields.append(
                {
                    "prompts": torch.tensor(prompt),
                    "responses": torch.tensor(tokens),
                    "response_mask": torch.ones(len(tokens), dtype=torch.int64),
                    "rollout_log_probs": torch.tensor(log_probs),
                    "rm_scores": scores,
                    "num_turns": 2,
                    "multi_modal_inputs": media,
                    "position_ids": self._positions(prompt + tokens, media),
                    "raw_prompt": [{"role": "user", "content": text}],
                }
            )
            keys.append(f"{uid}_{session}_{index}")
        tags = [{"status": "success", "global_steps": version + 1} for _ in keys]
        queue.kv_batch_put(keys, "train", fields=list_of_dict_to_tensordict(fields), tags=tags)


class SeeingAgent(Agent):
    """The same for a model that sees."""

    def _prompt_of(self, text):
        return pictures.prompt_of(text)

    def _positions(self, tokens, media):
        return pictures.positions(self._trainer.actor_rollout_wg.model, tokens, media)

    def _sampling(self):
        return {"inputs_of": pictures.model_inputs, "never": pictures.SPECIAL_IDS}


class Played:
    """A run in one process: `steps` figures, recorded events, gradients, and the trainer as it was left."""

    def __init__(
        self,
        folder,
        monkeypatch,
        *extra,
        inputs,
        reward=compute_score,
        rows_per_session=1,
        agent_class=Agent,
        model_class=AutoModelForCausalLM,
        **settings,
    ):
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(recording, "FOLDER", str(folder))
        recording.record_decisions(monkeypatch.setattr)
        self.folder, self.steps = folder, []
        self.queue = Queue()
        for module in (trainer_base, replay_buffer, padding_utils, rollwise_queue):
            monkeypatch.setattr(module, "tq", self.queue)
        arguments = [a for a in overrides(inputs, **settings) if not a.startswith(("hydra.", "+ray_kwargs"))]
        arguments += ["rollwise.poll_seconds=0.001", *extra]
        with initialize_config_module("rollwise.verl.config", version_base=None):
            config = compose("rollwise_ppo_trainer", ["hydra.searchpath=[pkg://verl.trainer.config]", *arguments])
        trainer = self.trainer = RollwiseTrainer(config)
        trainer.queue, trainer._store = self.queue, DriverStore()
        trainer._init_tokenizer()
        trainer._init_dataloader()
        trainer.actor_rollout_wg = Actor(self.queue, self._model(config, model_class), config)
        quiet = types.SimpleNamespace(sleep_replicas=lambda: None, update_weights=self._record_weights)
        trainer.checkpoint_manager = quiet
        trainer.reward_loop_manager = types.SimpleNamespace(reward_loop_worker_handles=[])
        trainer.resource_pool_manager = types.SimpleNamespace(get_n_gpus=lambda: 1)
        trainer.curr_step_profile = False
        trainer.agent_loop_manager = self.agent = agent_class(trainer, reward, rows_per_session)
        trainer.distillation_config = None
        trainer.global_steps = 0
        self._record_weights(0)

    @staticmethod
    def _model(config, model_class):
        path = config.actor_rollout_ref.model.path
        return model_class.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    def _record_weights(self, version):
        recording.record_weights(self.trainer.actor_rollout_wg.model.state_dict(), version)

    def play(self, num_steps):
        """What `fit` does around each step."""
        trainer = self.trainer
        for _ in range(num_steps):
            trainer.global_steps += 1
            trainer.timing_raw, metrics = {}, {}
            batch = trainer.step(metrics, trainer.timing_raw)
            trainer.on_step_end()
            trainer.timing_raw |= {"step": 1.0, "gen": 1.0}
            trainer._compute_metrics(batch, metrics, trainer.timing_raw, global_steps=trainer.global_steps, epoch=0)
            self.queue.kv_clear(batch.keys, batch.partition_id)
            self.steps.append(metrics)
        return self

    @property
    def events(self):
        return [json.loads(line) for line in (Path(self.folder) / "events.jsonl").read_text().splitlines()]

    def of_kind(self, kind):
        return [event for event in self.events if event["kind"] == kind]

    @property
    def gradients(self):
        return self.trainer.actor_rollout_wg.gradients
