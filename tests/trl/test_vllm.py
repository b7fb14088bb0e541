"""With vLLM what is asked of it is what the scheduler asked for, and its log-probs stay with their rows.

Against stubs, in TRL's server and colocate modes, through the real trainer: see `vllm_stub`.
"""

import os
from collections import defaultdict

import numpy as np
import pytest
import tiny
import trl
from packaging.version import Version
from processes import Launch
from trl import GRPOTrainer

from rollwise.rollout import Batch

# `vllm serve` and TRL speak another protocol in every few releases; the stub knows this one.
if Version(trl.__version__) < Version("1.16"):
    pytest.skip("the stub speaks the protocol of TRL 1.16", allow_module_level=True)

import vllm_stub
from vllm_stub import RecordingTrainer, SamplingReference, StubServer, check_run, closing, fake_llm
from vllm_worker import ALWAYS, PILOT_COMMIT

DYNAMIC = {"allocation": "dynamic_sampling", "allocation_kwargs": {"max_rounds": 4}}
ALLOCATIONS = {
    "uniform": {},
    "pilot_commit": PILOT_COMMIT | {"gradient_accumulation_steps": 2},
    "belief": {"allocation": "belief", "pilot_rollouts": 3, "per_device_train_batch_size": 32},
    "dynamic_sampling": DYNAMIC,
}


@pytest.fixture
def server(monkeypatch):
    with StubServer() as server:
        server.patch(monkeypatch)
        yield server


@pytest.fixture
def llm(monkeypatch):
    """The engine behind a `vllm.LLM`; TRL sets variables for it that other tests must not see."""
    saved = os.environ.copy()
    yield fake_llm(monkeypatch)
    os.environ.clear()
    os.environ.update(saved)


def on_server(tmp_path, server, trainer_class=RecordingTrainer, **settings):
    settings = ALWAYS | {"vllm_mode": "server", "vllm_server_base_url": server.url} | settings
    return closing(tiny.trainer(tmp_path, trainer_class=trainer_class, **settings))


def check(trainer, engine, mode, **kwargs):
    trained = check_run([trainer.report(engine)], examples=list(trainer.train_dataset), mode=mode, **kwargs)
    assert trainer.state.global_step == trainer.args.max_steps
    assert any(row["is_replayed"] and row["age"] > 0 for row in trained)
    if trainer.args.allocation == "pilot_commit":
        assert any(row["age"] > 0 and not row["is_replayed"] for row in trained)  # pilots, trained on with commits
    return trained


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_server(tmp_path, server, allocation):
    with on_server(tmp_path, server, **ALLOCATIONS[allocation]) as trainer:
        trainer.train()
        check(trainer, server.engine, "server", num_generations=8 if allocation == "uniform" else 1)
    if allocation == "dynamic_sampling":
        assert len(trainer.asks) > trainer.args.max_steps  # several rounds in a step, on the same weights
    assert server.log.count("/v1/completions") == len(trainer.asks)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("sleeps", [False, True])
def test_colocate(tmp_path, llm, allocation, sleeps):
    settings = ALWAYS | {"vllm_mode": "colocate", "vllm_enable_sleep_mode": sleeps} | ALLOCATIONS[allocation]
    trainer = tiny.trainer(tmp_path, trainer_class=RecordingTrainer, **settings)
    trainer.train()
    check(trainer, llm, "colocate", sleeps=sleeps)


@pytest.mark.parametrize("clip_max", [1.1, 100.0])
def test_one_ratio_per_sequence(tmp_path, server, clip_max):
    """TRL's default: the product over the row, and 0 above the bound."""

    def ratio(deltas):
        product = np.exp(np.sum(deltas))
        return [product if product <= clip_max else 0.0]

    settings = {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": clip_max}
    with on_server(tmp_path, server, **PILOT_COMMIT, **settings) as trainer:
        trainer.train()
        trained = check(trainer, server.engine, "server", ratio=ratio)
    ratios = [row["ratio"][0] for row in trained]
    assert (min(ratios) == 0) == (clip_max == 1.1)
    assert max(ratios) > 1


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_the_gradient_is_the_references_with_the_ratio_of_policy_and_sampler(tmp_path, server, loss):
    reference = SamplingReference(server.engine)
    settings = PILOT_COMMIT | {"replay_ratio": 1.0, "max_steps": 6, "loss_type": loss}
    with on_server(tmp_path, server, callbacks=[reference], **settings) as trainer:
        reference.watch(trainer).train()
    assert len(reference.errors) == 6
    assert max(reference.errors) < 2e-5
    assert {"pilot", "commit", "replay"} == set(reference.sources)
    assert max(reference.ages) > 1


def test_replay_only_updates_ask_for_nothing(tmp_path, server):
    settings = {"replay_updates_per_fresh": 1, "replay_warmup_steps": 0, "max_steps": 6}
    with on_server(tmp_path, server, **settings) as trainer:
        trainer.train()
        check(trainer, server.engine, "server", num_generations=8)
    assert [step for step, _ in trainer.asks] == [0, 2, 4]


def test_evaluation_generates_as_stock_trl_does(tmp_path, server):
    settings = {"per_device_eval_batch_size": 4, "num_generations_eval": 2, "max_steps": 2, "eval_strategy": "no"}
    evaluation = tiny.dataset(5, seed=1)
    with on_server(tmp_path / "ours", server, eval_dataset=evaluation, **PILOT_COMMIT, **settings) as trainer:
        trainer.train()
        asked, made = len(server.engine.calls), len(server.engine.made)
        check(trainer, server.engine, "server")
        trainer.evaluate()
        ours = server.engine.calls[asked:]
        assert trainer.ledger.totals()["rollouts_generated"] == made < len(server.engine.made)

    asked = len(server.engine.calls)
    with on_server(
        tmp_path / "stock", server, trainer_class=GRPOTrainer, eval_dataset=evaluation, **settings
    ) as trainer:
        trainer.evaluate()
    stock = server.engine.calls[asked:]
    assert [(call["prompts"], call["n"]) for call in ours] == [(call["prompts"], call["n"]) for call in stock]
    assert {call["n"] for call in ours} == {2}


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_process_resumed_at_a_replay_only_update_may_have_no_rows(tmp_path, server, level):
    """It has generated nothing yet that neutral rows could be made like, and TRL's loss reads a ratio of every row."""
    with on_server(tmp_path, server, vllm_importance_sampling_mode=f"{level}_truncate") as trainer:
        nothing = Batch(step=1, rows=(), normalizer_rows=8, normalizer_tokens=40, success_rate=float("nan"))
        trainer.current_gradient_accumulation_steps = 1
        assert GRPOTrainer._compute_loss(trainer, trainer.model, trainer._pack(nothing)).item() == 0


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    runs = [[scenario, mode] for mode in ("server", "colocate") for scenario in ("uniform", "pilot_commit")]
    return Launch("vllm_worker.py", tmp_path_factory, runs, num_processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["server", "colocate"])
@pytest.mark.parametrize("scenario", ["uniform", "pilot_commit"])
def test_two_processes(launch, mode, scenario):
    reports = launch.results(scenario, mode)
    num_generations = 8 if scenario == "uniform" else 1
    trained = check_run(reports, examples=list(tiny.dataset()), mode=mode, num_generations=num_generations)
    assert any(row["is_replayed"] for row in trained)
    for report in reports:
        assert all(len(rows) == len(reports[0]["stored"][i]) for i, rows in enumerate(report["stored"]))
        assert report["totals"] == reports[0]["totals"]
        assert report["purposes"].get("padding", 0) == (
            0 if scenario == "uniform" else reports[0]["purposes"]["padding"]
        )
    if scenario == "pilot_commit":
        assert reports[0]["purposes"]["padding"] > 0  # an odd number of rollouts was levelled, and counted


def test_episodes(tmp_path, llm, monkeypatch):
    """Turn by turn, the answers of all live episodes come from one call; their log-probs stay where they belong."""
    pytest.importorskip("gymnasium", reason="environments need gymnasium")
    import tiny_episodes

    monkeypatch.setattr(vllm_stub, "MAX_TOKENS", 2)
    llm.model = tiny_episodes.model().eval()
    settings = ALWAYS | {"vllm_mode": "colocate", "max_completion_length": 2, "max_steps": 3}
    trainer = tiny_episodes.trainer(tmp_path, **settings)
    trainer.train()
    assert trainer.state.global_step == 3
    sizes = [len(call["prompts"]) for call in llm.calls]
    firsts = [i for i, size in enumerate(sizes) if i == 0 or size > sizes[i - 1]]
    assert sizes[0] == 16
    assert len(firsts) >= 3
    assert all(call["n"] == 1 for call in llm.calls)
    made = defaultdict(list)  # the same answer to the same context may have been made more than once
    for one in llm.made:
        made[tuple(one["prompt"]), tuple(one["tokens"])].append(one["logprobs"])
    stored = trainer.scheduler.buffer.rollouts
    assert stored
    for rollout in stored:
        row = rollout.payload
        tokens = [*row["prompt_ids"].tolist(), *row["completion_ids"].tolist()]
        mask = [0] * len(row["prompt_ids"]) + row["tool_mask"].tolist()
        logps = np.concatenate([np.zeros(len(row["prompt_ids"])), row["sampling_per_token_logps"]])
        assert not logps[np.array(mask) == 0].any()
        starts = [i for i in range(len(mask)) if mask[i] and not mask[i - 1]]
        assert starts
        for start in starts:
            end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            known = made[tuple(tokens[:start]), tuple(tokens[start:end])]
            assert any(np.allclose(logps[start:end], expected, atol=1e-5) for expected in known)
