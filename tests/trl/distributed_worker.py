"""One of several processes of a training run; `test_distributed.py` starts them."""

import json
import os
import sys
from pathlib import Path

import tiny
import torch
from reference import GradientReference

from rollwise.trl import packing

ALL = {"allocation": "pilot_commit", "pilot_rollouts": 3, "pilot_prompts": 5, "p_lower": 0.1, "replay_ratio": 0.5}
SCENARIOS = {
    "all": ALL | {"loss_type": "grpo", "gradient_accumulation_steps": 2},
    "replay": {"replay_ratio": 1.0, "loss_type": "dapo", "per_device_train_batch_size": 16},
    # Process 1 never sees two different rewards: it has no row of its own to train on.
    "none on one process": {"replay_ratio": 1.0, "loss_type": "grpo"},
}


def main(scenario, folder):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    reference = GradientReference()
    settings = {"per_device_train_batch_size": 8, "max_steps": 5, "learning_rate": 3e-3} | SCENARIOS[scenario]
    if scenario == "none on one process" and rank == 1:
        # Groups do not span processes here: 8 rollouts a process, 8 a group.
        reward = lambda completions, **kwargs: [0.0] * len(completions)  # noqa: E731
        reward.__name__ = "contains_answer"
        tiny.contains_answer = reward
    travelled = []
    gather = packing.gather_object
    packing.gather_object = lambda items: travelled.append(len(items)) or gather(items)
    trainer = tiny.trainer(folder, callbacks=[] if scenario == "none on one process" else [reference], **settings)
    if scenario != "none on one process":
        reference.watch(trainer)
    packed_rows = []
    pack = trainer._pack
    trainer._pack = lambda batch: packed_rows.append(len((output := pack(batch))["advantages"])) or output
    trainer.train()
    result = {
        "errors": reference.errors,
        "weights": [p.double().sum().item() for p in trainer.model.parameters()],
        "packed_rows": packed_rows,
        "totals": trainer.ledger.totals(),
        "purposes": trainer.ledger.by_purpose(),
        "owned": sum(r.owner == rank for r in trainer.scheduler.buffer.rollouts),
        "payloads": sum(r.payload is not None for r in trainer.scheduler.buffer.rollouts),
        "stored": len(trainer.scheduler.buffer),
        "travelled": sum(travelled),
        "steps": trainer.state.global_step,
    }
    (Path(folder) / f"result-{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo's that outlives the interpreter would abort the process now and then


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
