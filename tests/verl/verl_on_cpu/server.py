"""A rollout server that samples with a transformers model, one request after the other.

What a request gets depends on its prompt, the policy's version and how many requests of that prompt that version has
had: two runs that ask for the same get the same, to the last bit.
"""

import asyncio
import hashlib
import json
import os

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from verl_on_cpu.recording import FOLDER, record_gradients, record_weights


def _server_name(rank):
    return f"rollout_server_{rank}"


class ServerAdapter(BaseRollout):
    """Carries the trained weights to the server."""

    def __init__(self, config, model_config, device_mesh, **kwargs):
        super().__init__(config, model_config, device_mesh)
        if FOLDER:  # this is where the trained model is
            record_gradients()
        self._rank = int(os.environ["RANK"])

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, wire_format="named_tensors", global_steps=None, **kwargs):
        state = {}
        if hasattr(weights, "__aiter__"):
            async for name, tensor in weights:
                state[name] = tensor.detach().float().cpu().clone()
        else:
            for name, tensor in weights:
                state[name] = tensor.detach().float().cpu().clone()
        await ray.get_actor(_server_name(self._rank)).update_weights.remote(state, global_steps)


class Server:
    def __init__(self, model_path, max_tokens):
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self._max_tokens = max_tokens
        self._version = None
        self._requests = {}  # of this version: prompt -> how many
        self._log = os.environ.get("VERL_ON_CPU_REQUEST_LOG")

    async def update_weights(self, state, global_steps):
        unexpected = self._model.load_state_dict(state, strict=False).unexpected_keys
        assert not unexpected, unexpected
        self._version, self._requests = global_steps, {}
        record_weights(state, global_steps)

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        prompt = tuple(prompt_ids)
        count = self._requests[prompt] = self._requests.get(prompt, 0) + 1
        key = repr((prompt, self._version, count)).encode()
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:7]))
        limit = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens") or self._max_tokens
        temperature = float(sampling_params.get("temperature", 1.0))
        tokens, log_probs = self._sample(prompt, min(limit, self._max_tokens), temperature, generator)
        if self._log:
            with open(self._log, "a") as file:
                file.write(json.dumps({"prompt": prompt, "version": self._version, "tokens": tokens}) + "\n")
        return TokenOutput(
            token_ids=tokens,
            log_probs=log_probs,
            stop_reason="completed",
            extra_fields={"global_steps": self._version},
        )

    @torch.no_grad()
    def _sample(self, prompt, limit, temperature, generator):
        inputs, past, tokens, log_probs = torch.tensor([prompt]), None, [], []
        while len(tokens) < limit:
            output = self._model(input_ids=inputs, past_key_values=past, use_cache=True)
            past = output.past_key_values
            log_probs_V = torch.log_softmax(output.logits[0, -1] / max(temperature, 1e-6), -1)
            if temperature > 0:
                token = int(torch.multinomial(log_probs_V.exp(), 1, generator=generator))
            else:
                token = int(log_probs_V.argmax())
            tokens.append(token)
            log_probs.append(float(log_probs_V[token]))
            if token == self._model.config.eos_token_id:
                break
            inputs = torch.tensor([[token]])
        return tokens, log_probs

    async def _nothing(self, *args, **kwargs):
        await asyncio.sleep(0)

    sleep = wake_up = abort_all_requests = resume_generation = _nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


class TransformersReplica(RolloutReplica):
    async def launch_servers(self):
        options = {"name": _server_name(self.replica_rank), "num_cpus": 0}
        server = ray.remote(Server).options(**options).remote(self.model_config.path, self.config.response_length)
        self.servers, self._server_handle = [server], server
        self._server_address = f"transformers://{self.replica_rank}"
