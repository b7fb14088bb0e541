"""Writes down what a run does, for tests: in the folder that VERL_ON_CPU_RECORD names.

events.jsonl                 every `ask`, `tell` and `batch` of the scheduler, with tokens and rewards
weights-<version>.safetensors   what the rollout server generates with
gradient-<n>.safetensors     what the optimizer's n-th step is given, unsharded
"""

import json
import os
from pathlib import Path

FOLDER = os.environ.get("VERL_ON_CPU_RECORD")


def record_weights(state, version):
    from safetensors.torch import save_file

    if FOLDER:
        # Tied ones share memory, which safetensors refuses.
        copies = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        save_file(copies, f"{FOLDER}/weights-{version}.safetensors")


def record_gradients():
    """Patch the engine's optimizer step."""
    from safetensors.torch import save_file
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    step = FSDPEngine.optimizer_step
    num_steps = 0

    def recorded_step(self):
        nonlocal num_steps
        gradients = {}
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                gradients[name] = gradient.detach().clone().contiguous()
        if int(os.environ.get("RANK", 0)) == 0:
            save_file(gradients, f"{FOLDER}/gradient-{num_steps}.safetensors")
        num_steps += 1
        return step(self)

    FSDPEngine.optimizer_step = recorded_step


def record_decisions(patch=setattr):
    """Patch the scheduler."""
    from rollwise.scheduler import RolloutScheduler

    ask, tell, batch = RolloutScheduler.ask, RolloutScheduler.tell, RolloutScheduler.batch

    def write(**event):
        with open(Path(FOLDER) / "events.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")

    def described(rollout):
        arrays = rollout.payload if isinstance(rollout.payload, dict) else {}
        names = ("prompt_ids", "response_ids", "response_mask", "prompt_lengths", "response_lengths")
        return {
            "prompt": rollout.prompt_id,
            "reward": rollout.reward,
            "purpose": rollout.purpose,
            "birth_step": rollout.birth_step,
            "num_tokens": rollout.num_tokens,
            "td_error": rollout.td_error,
            "number": rollout_numbers.setdefault(id(rollout), (len(rollout_numbers), rollout))[0],
        } | {name: arrays[name].tolist() for name in names if name in arrays}

    rollout_numbers = {}  # holds on to the rollouts, so that no id comes twice

    def recorded_ask(self, *args, **kwargs):
        requests = ask(self, *args, **kwargs)
        wanted = [[request.prompt_id, request.num_rollouts, request.purpose] for request in requests]
        write(kind="ask", step=self.step, requests=wanted)
        return requests

    def recorded_tell(self, rollouts):
        if os.environ.get("VERL_ON_CPU_REWARDS"):  # written beforehand, whatever order verl's reward calls came in
            from decisions import next_reward_of

            for rollout in rollouts:
                rollout.reward = next_reward_of(rollout.prompt_id)
        tell(self, rollouts)
        write(kind="tell", step=self.step, rollouts=[described(rollout) for rollout in rollouts])

    def recorded_batch(self):
        made = batch(self)
        rows = [
            described(row.rollout) | {"advantage": row.advantage, "source": row.source, "weight": row.weight}
            for row in made.rows
        ]
        sizes = {"normalizer_rows": made.normalizer_rows, "normalizer_tokens": made.normalizer_tokens}
        write(kind="batch", step=made.step, rows=rows, **sizes)
        return made

    patch(RolloutScheduler, "ask", recorded_ask)
    patch(RolloutScheduler, "tell", recorded_tell)
    patch(RolloutScheduler, "batch", recorded_batch)
