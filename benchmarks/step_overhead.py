"""How much of a training step is Rollwise's own work: scheduler, buffer, rows, packing.

    python benchmarks/step_overhead.py [--steps 20] [--recipe examples/arithmetic_all.yaml] [--json PATH]

Trains the embedded workload as the recipe says and takes, for every step, the time inside the library but outside
TRL's own methods. The extra forward pass that TRL makes for the behaviour policy's log-probs counts as TRL's; it is
what `--json` calls neither generation nor rollwise. Steps before replay begins and the first two are left out.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from rollwise.tasks import arithmetic
from rollwise.trl import RollwiseGRPOConfig, RollwiseGRPOTrainer


class StepTimes(TrainerCallback):
    def __init__(self):
        self.trainer, self.rows = None, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter(), self.trainer.seconds_generation, self.trainer.seconds_rollwise

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter(), self.trainer.seconds_generation, self.trainer.seconds_rollwise
        self.rows.append([after - before for before, after in zip(self.started, now, strict=True)])
        print(f"\rstep {state.global_step} of {args.max_steps}", end="", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--recipe", type=Path, default=Path(__file__).parents[1] / "examples" / "arithmetic_all.yaml")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)  # the model is too small for more to help
    recipe = yaml.safe_load(options.recipe.read_text())
    settings = {name: value for name, value in recipe.items() if name in RollwiseGRPOConfig.__dataclass_fields__}
    settings |= {"max_steps": options.steps, "eval_strategy": "no", "eval_on_start": False, "disable_tqdm": True}
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = RollwiseGRPOTrainer(
            model=str(arithmetic.model_path()),
            reward_funcs=arithmetic.exact_match_reward,
            args=RollwiseGRPOConfig(output_dir=folder, **settings),
            train_dataset=arithmetic.load_dataset(num_train=4000, num_test=256)["train"],
            callbacks=[times],
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        times.trainer = trainer
        trainer.train()
    print()

    skipped = max(2, trainer.args.replay_warmup_steps)
    step, generation, own = 1000 * np.median(np.array(times.rows[skipped:]), axis=0)
    result = {
        "steps": len(times.rows) - skipped,
        "rollouts_per_step": trainer.ledger.totals()["rollouts_generated"] / options.steps,
        "median_step_ms": round(step, 2),
        "median_generation_ms": round(generation, 2),
        "median_rollwise_ms": round(own, 2),
        "rollwise_share": round(own / step, 4),
    }
    for name, value in result.items():
        print(f"{name:22} {value:g}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
