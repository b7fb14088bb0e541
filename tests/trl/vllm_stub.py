"""What TRL's vLLM modes talk to, without vLLM and without a GPU.

`Engine` samples with a tiny model of its own, whose weights come only through TRL's weight updates, and remembers every
completion. `StubServer` puts it behind the HTTP protocol of `vllm serve` (server mode), `fake_llm` behind the class
`vllm.LLM` (colocate mode). Both refuse what vLLM refuses, and calls out of order. TRL's own code is patched only where
it imports from vllm, and where it insists on CUDA for NCCL.

The log-probs that the engine reports are the true ones less a small amount of their own for every token (`deltas`):
they tell rows and tokens apart, and TRL's ratio of policy and sampler is exp(delta) as long as the weights are in step.
"""

import json
import math
import queue
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import tiny
import torch
from reference import GradientReference
from trl.generation import vllm_client, vllm_generation

from rollwise.trl import RollwiseGRPOTrainer
from rollwise.trl.corrections import REPLAYED_KEY, loss_mask

MAX_TOKENS = 6
DELTA = 1e-4
MODEL = "tiny"


class RefusedError(ValueError):
    """Something that vLLM would not have done."""


class Engine:
    """Weights and completions of a vLLM; `calls` and `made` say what was asked of it and what it made."""

    def __init__(self):
        self.model = tiny.model(seed=99).eval()  # not the policy's weights: those have to be sent
        self.generator = torch.Generator().manual_seed(0)
        self.calls, self.made = [], []
        self.syncs = 0
        self.is_fresh = False  # prefix cache, after the weights have changed

    def load(self, name, weights):
        parameter = dict(self.model.named_parameters())[name]
        if parameter.shape != weights.shape:
            raise RefusedError(f"{name} is {tuple(weights.shape)}, not {tuple(parameter.shape)}")
        parameter.data.copy_(weights)
        self.is_fresh = False

    def reset_prefix_cache(self):
        self.is_fresh = True
        self.syncs += 1

    def generate(self, prompts, n, max_tokens, **params):
        """Completions, prompt-major."""
        if not self.is_fresh:
            raise RefusedError("generating from weights that were never sent, or with the old weights' prefix cache")
        if not prompts or not all(prompt and all(type(token) is int for token in prompt) for prompt in prompts):
            raise RefusedError(f"prompts must be lists of token ids, none of them empty: {prompts}")
        if n < 1 or max_tokens != MAX_TOKENS:
            raise RefusedError(f"n is {n}, max_tokens {max_tokens}")
        expected = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "min_p": 0.0, "logprobs": 0}
        if {name: params.get(name) for name in expected} != expected or params.get("top_k") not in (0, -1):
            raise RefusedError(f"sampling parameters are {params}")
        self.calls.append({"prompts": prompts, "n": n, "sync": self.syncs})
        rows = [prompt for prompt in prompts for _ in range(n)]
        made = [None] * len(rows)
        for length in {len(row) for row in rows}:  # equal lengths need no padding
            members = [i for i, row in enumerate(rows) if len(row) == length]
            for i, completion in zip(members, self._sample([rows[i] for i in members]), strict=True):
                made[i] = completion
        for prompt, (tokens, logps) in zip(rows, made, strict=True):
            serial = len(self.made)
            deltas = [DELTA * (serial * MAX_TOKENS + t) for t in range(len(tokens))]
            reported = [logp - delta for logp, delta in zip(logps, deltas, strict=True)]
            self.made.append({"prompt": prompt, "tokens": tokens, "logprobs": reported, "deltas": deltas})
        return self.made[-len(rows) :]

    @torch.no_grad()
    def _sample(self, prompts):
        ids = torch.tensor(prompts)
        logps = []
        for _ in range(MAX_TOKENS):
            all_logps = self.model(input_ids=ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(all_logps.exp(), 1, generator=self.generator)
            ids = torch.cat([ids, token], dim=1)
            logps.append(all_logps.gather(1, token))
        completions = ids[:, len(prompts[0]) :].tolist()
        ends = [row.index(tiny.EOS) + 1 if tiny.EOS in row else MAX_TOKENS for row in completions]
        rows = torch.cat(logps, dim=1).double().tolist()
        return [(tokens[:end], row[:end]) for tokens, row, end in zip(completions, rows, ends, strict=True)]


class StubServer:
    """`vllm serve` as TRL's client sees it, in a thread; use it as a context."""

    def __init__(self):
        self.engine = Engine()
        self.nccl = queue.Queue()  # what TRL would broadcast over NCCL
        self.is_initialized = self.is_updating = False
        self.log = []  # of requests
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                self.answer(stub.get, self.path.split("?")[0])

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.answer(stub.post, self.path, json.loads(body) if body else {})

            def answer(self, method, *args):
                stub.log.append(args[0])
                try:
                    status, answer = 200, method(*args)
                except Exception as error:  # noqa: BLE001  # TRL's client raises, with this text
                    status, answer = 400, {"error": repr(error)}
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def get(self, path):
        config = {
            "weight_transfer_config": {"backend": "nccl"},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }
        return {
            "/health": {},
            "/v1/models": {"data": [{"id": MODEL}]},
            "/server_info": {"vllm_config": config},
            "/get_world_size": {"world_size": 1},
        }[path]

    def post(self, path, body):
        if path == "/v1/completions":
            return {"choices": self.complete(**body)}
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            if info["world_size"] != 2 or info["rank_offset"] != 1 or not info["packed"]:
                raise RefusedError(f"init_info is {info}")
            self.is_initialized = True
        elif path == "/start_weight_update":
            self.expect(self.is_initialized and not self.is_updating, path)
            self.is_updating = True
        elif path == "/update_weights":
            self.expect(self.is_updating, path)
            info = body["update_info"]
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                sent_name, weights = self.nccl.get(timeout=60)
                self.expect(
                    (sent_name, f"torch.{dtype}", shape) == (name, str(weights.dtype), list(weights.shape)), name
                )
                self.engine.load(name, weights)
        elif path == "/finish_weight_update":
            self.expect(self.is_updating and self.nccl.empty(), path)
            self.is_updating = False
        elif path == "/reset_prefix_cache":
            self.expect(not self.is_updating, path)
            self.engine.reset_prefix_cache()
            return {"success": True}
        else:
            raise RefusedError(f"no such endpoint: {path}")
        return {}

    def complete(self, model, prompt, return_token_ids, return_tokens_as_token_ids, **params):
        self.expect(model == MODEL and return_token_ids and return_tokens_as_token_ids, "/v1/completions")
        self.expect(not self.is_updating, "/v1/completions")
        return [
            {
                "prompt_token_ids": made["prompt"],
                "token_ids": made["tokens"],
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in made["tokens"]],
                    "token_logprobs": made["logprobs"],
                    "top_logprobs": [None] * len(made["tokens"]),
                },
            }
            for made in self.engine.generate(prompt, **params)
        ]

    @staticmethod
    def expect(condition, what):
        if not condition:
            raise RefusedError(f"{what}: out of order, or not as announced")

    def patch(self, monkeypatch):
        """Let TRL's client talk to this server, with a queue in the place of NCCL."""

        def broadcast(iterator, group, src, post_iter_func):
            for item in iterator:
                self.nccl.put((item[0], post_iter_func(item).detach().clone()))

        init_communicator = vllm_client.VLLMClient.init_communicator
        names = {
            "get_ip": lambda: "127.0.0.1",
            "_HAS_STATEFUL_TRAINER_ENGINE": True,
            "_HAS_RESET_PREFIX_CACHE_SUCCESS": True,
            "open_trainer_endpoint": lambda init_info: SimpleNamespace(group=SimpleNamespace()),
            "packed_nccl_broadcast_producer": broadcast,
        }
        for name, value in names.items():
            monkeypatch.setattr(vllm_client, name, value, raising=False)
        for module in (vllm_client, vllm_generation):
            monkeypatch.setattr(module, "is_vllm_available", lambda *args, **kwargs: True)
        # Without an index nothing of CUDA's is called: this only passes the check for it.
        monkeypatch.setattr(
            vllm_client.VLLMClient, "init_communicator", lambda client, device: init_communicator(client, "cuda")
        )


def fake_llm(monkeypatch):
    """Put an engine behind the name `LLM` in TRL's vLLM code; returns it."""
    engine = Engine()
    asleep = set()

    class LLM:
        def __init__(self, model, *, tensor_parallel_size, logprobs_mode, enable_sleep_mode, **kwargs):
            assert tensor_parallel_size == 1
            assert logprobs_mode == "processed_logprobs"
            self.has_sleep_mode = enable_sleep_mode
            model = SimpleNamespace(load_weights=self.load_weights)
            driver = SimpleNamespace(model_runner=SimpleNamespace(model=model))
            self.llm_engine = SimpleNamespace(
                model_executor=SimpleNamespace(driver_worker=driver), model_config=SimpleNamespace(max_model_len=64)
            )

        def load_weights(self, weights):
            if "weights" in asleep:
                raise RefusedError("loading weights into memory that is not there")
            for name, tensor in weights:
                engine.load(name, tensor)

        def sleep(self, level):
            assert level == 2
            assert self.has_sleep_mode
            asleep.update(("weights", "kv_cache"))
            engine.is_fresh = False
            for parameter in engine.model.parameters():
                parameter.data.fill_(math.nan)  # level 2 discards the weights

        def wake_up(self, tags):
            asleep.difference_update(tags)

        def reset_prefix_cache(self):
            engine.reset_prefix_cache()

        def generate(self, prompts, sampling_params, use_tqdm):
            if asleep:
                raise RefusedError(f"generating with {asleep} asleep")
            n, params = sampling_params["n"], {k: v for k, v in sampling_params.items() if k != "n"}
            made = engine.generate([prompt["prompt_token_ids"] for prompt in prompts], n, **params)
            return [
                SimpleNamespace(
                    prompt_token_ids=made[i]["prompt"], outputs=[self.output(one) for one in made[i : i + n]]
                )
                for i in range(0, len(made), n)
            ]

        @staticmethod
        def output(made):
            pairs = zip(made["tokens"], made["logprobs"], strict=True)
            logprobs = [{token: SimpleNamespace(logprob=logp, rank=1)} for token, logp in pairs]
            return SimpleNamespace(token_ids=made["tokens"], logprobs=logprobs)

    monkeypatch.setattr(vllm_generation, "LLM", LLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", dict, raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda *args, **kwargs: True)
    return engine


@contextmanager
def closing(trainer):
    """Close TRL's client at the end: it leaves that to the garbage collector, which warns of its sockets."""
    try:
        yield trainer
    finally:
        if client := getattr(trainer.vllm_generation, "vllm_client", None):
            client.session.close()
            client.close_communicator()


class RecordingTrainer(RollwiseGRPOTrainer):
    """Keeps what was asked, what was stored of it, and what the loss was computed of, as plain lists."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asks, self.stored, self.trained = [], [], []
        ask = self.scheduler.ask

        def recording_ask(step=None, prompts=None):
            requests = ask(step, prompts)
            if requests:
                self.asks.append([self.state.global_step, [(r.prompt_id, r.num_rollouts) for r in requests]])
            return requests

        self.scheduler.ask = recording_ask

    def _as_rollouts(self, output, prompt_ids, **kwargs):
        rollouts = super()._as_rollouts(output, prompt_ids, **kwargs)
        self.stored.append(
            [
                {
                    "prompt_id": rollout.prompt_id,
                    "reward": rollout.reward,
                    "prompt": rollout.payload["prompt_ids"].tolist(),
                    "tokens": rollout.payload["completion_ids"].tolist(),
                    "logprobs": rollout.payload["sampling_per_token_logps"].tolist(),
                    "ratio": rollout.payload["importance_sampling_ratio"].tolist(),
                }
                for rollout in rollouts
                if rollout.owner == self.accelerator.process_index
            ]
        )
        return rollouts

    def _compute_loss(self, model, inputs):
        lengths = loss_mask(inputs).sum(1).tolist() if self.model.training else []
        for i, length in enumerate(lengths):
            if length:  # not a neutral row
                prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
                self.trained.append(
                    {
                        "step": self.state.global_step,
                        "is_replayed": inputs[REPLAYED_KEY][i].item(),
                        "prompt": prompt.tolist(),
                        "tokens": inputs["completion_ids"][i][:length].tolist(),
                        "logprobs": inputs["sampling_per_token_logps"][i][:length].tolist(),
                        "ratio": inputs["importance_sampling_ratio"][i][:length].tolist(),
                    }
                )
        return super()._compute_loss(model, inputs)

    def report(self, engine):
        """What `check_run` takes of one process; `engine` is its engine, if it has one."""
        return {
            "asks": self.asks,
            "stored": self.stored,
            "trained": self.trained,
            "totals": self.ledger.totals(),
            "purposes": self.ledger.by_purpose(),
            "calls": engine.calls if engine else [],
            "made": engine.made if engine else [],
        }


def expected_calls(asks, examples, world_size, num_generations, mode):
    """Per ask the prompt ids and the requests (prompts, n) that each engine should get."""
    tokenizer = tiny.tokenizer()
    tokens = [tokenizer(example["prompt"])["input_ids"] for example in examples]
    for _, requests in asks:
        ids = [prompt_id for prompt_id, num_rollouts in requests for _ in range(num_rollouts)]
        ids += ids[:1] * (-len(ids) % world_size)
        if mode == "colocate":
            share = len(ids) // world_size
            parts = [ids[rank * share : (rank + 1) * share] for rank in range(world_size)]
            yield ids, [([tokens[i] for i in part], 1) for part in parts]
        elif num_generations == 1:
            yield ids, [([tokens[i] for i in ids], 1)]
        else:
            yield ids, [([tokens[i] for i, _ in requests], num_generations)]


def check_run(reports, *, examples, mode, num_generations=1, sleeps=False, ratio=np.exp):
    """Compare what the engines were asked and made with what the processes asked, stored and trained on.

    `num_generations` is the n that TRL should ask for in server mode, `ratio` what it makes of a row's `deltas`, and
    `sleeps` says whether vLLM loses its weights after every call. Returns the trained rows.
    """
    asks, world_size = reports[0]["asks"], len(reports)
    assert all(report["asks"] == asks for report in reports)
    engines = [report for report in reports if report["calls"]]
    assert len(engines) == (world_size if mode == "colocate" else 1)
    assert all(len(engine["calls"]) == len(asks) for engine in engines)  # one call per ask, and no others

    origins = {}  # a row as it should be stored -> (its number in `flat`, the step that made it)
    flat = []
    starts = [0] * len(engines)
    syncs = {}
    for number, (ids, calls) in enumerate(expected_calls(asks, examples, world_size, num_generations, mode)):
        step = asks[number][0]
        made = []
        for e, ((prompts, n), engine) in enumerate(zip(calls, engines, strict=True)):
            call = engine["calls"][number]
            assert (call["prompts"], call["n"]) == (prompts, n)
            syncs.setdefault((e, step), []).append(call["sync"])
            made += engine["made"][starts[e] : starts[e] + len(prompts) * n]
            starts[e] += len(prompts) * n
        assert len(made) == len(ids)  # exactly as many as were asked for, and the padding
        stored = [row for report in reports for row in report["stored"][number]]
        for prompt_id, row, one in zip(ids, stored, made, strict=True):
            assert row["prompt_id"] == prompt_id
            assert (row["prompt"], row["tokens"]) == (one["prompt"], one["tokens"])
            assert row["logprobs"] == np.float32(one["logprobs"]).tolist()
            np.testing.assert_allclose(row["ratio"], ratio(one["deltas"]), rtol=2e-5, atol=2e-5)
            text = tiny.tokenizer().decode(one["tokens"], skip_special_tokens=True)
            assert [row["reward"]] == tiny.contains_answer([text], [examples[prompt_id]["answer"]])
            origins[identity(row)] = len(flat), step
            flat.append(one)
    assert starts == [len(engine["made"]) for engine in engines]
    assert len(origins) == len(flat)  # their log-probs tell all rows apart
    numbers = [number for synced in syncs.values() for number in (synced if sleeps else set(synced))]
    assert len(numbers) == len(engines) * len(set(numbers))  # sent once a step, or before every call where vLLM sleeps

    totals = reports[0]["totals"]
    assert totals["rollouts_generated"] == len(flat)
    outcomes = ("rollouts_trained", "rollouts_wasted", "rollouts_pending")
    assert sum(totals[name] for name in outcomes) == len(flat)
    trained = [row for report in reports for row in report["trained"]]
    assert sum(row["is_replayed"] for row in trained) == totals["rows_replayed"]
    for row in trained:
        number, born = origins[identity(row)]
        np.testing.assert_allclose(row["ratio"], ratio(flat[number]["deltas"]), rtol=2e-5, atol=2e-5)
        assert born < row["step"] if row["is_replayed"] else born <= row["step"]
        row["age"] = row["step"] - born
    return trained


def identity(row):
    return tuple(row["prompt"]), tuple(row["tokens"]), tuple(row["logprobs"])


class SamplingReference(GradientReference):
    """The reference gradient, with TRL's token-level ratio of policy and sampler as the engine knows it."""

    def __init__(self, engine, **kwargs):
        super().__init__(**kwargs)
        self.engine = engine

    def sampling_ratio(self, row):
        key = row["sampling_per_token_logps"].tolist()
        (made,) = [m for m in self.engine.made if np.float32(m["logprobs"]).tolist() == key]
        return torch.tensor(made["deltas"]).exp()
