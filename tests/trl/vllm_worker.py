"""One of several processes of one run after another on the stub of vLLM; `test_vllm.py` starts them."""

import os
from contextlib import ExitStack

import pytest
import tiny
from processes import serve
from vllm_stub import RecordingTrainer, StubServer, closing, fake_llm

PILOT_COMMIT = {"allocation": "pilot_commit", "pilot_rollouts": 3, "pilot_prompts": 5, "p_lower": 0.1}
SCENARIOS = {"uniform": {}, "pilot_commit": PILOT_COMMIT}
ALWAYS = {
    "use_vllm": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 100.0,
    "replay_ratio": 0.5,
    "max_steps": 5,
    "learning_rate": 3e-3,
}


def run(scenario, folder, mode):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    settings = ALWAYS | {"per_device_train_batch_size": 8, "ddp_timeout": 60, "vllm_mode": mode} | SCENARIOS[scenario]
    with pytest.MonkeyPatch.context() as monkeypatch, ExitStack() as stack:
        engine = None
        if mode == "colocate":
            engine = fake_llm(monkeypatch)
        else:
            # The client is the main process's, and so is this server; the others need a patch all the same.
            server = stack.enter_context(StubServer())
            server.patch(monkeypatch)
            settings["vllm_server_base_url"] = server.url
            engine = server.engine if rank == 0 else None
        trainer = tiny.trainer(folder, trainer_class=RecordingTrainer, **settings)
        if mode == "server" and rank == 0:
            stack.enter_context(closing(trainer))
        trainer.train()
        assert trainer.accelerator.num_processes == world_size
        return trainer.report(engine)


if __name__ == "__main__":
    serve(run)
