"""How well `rollwise simulate` predicts real runs of the embedded workload.

    python benchmarks/simulate_check.py [--steps 20] [--pilots 8] [--pilot_prompts 768] [--json PATH]

1. Pilots: a few rollouts of some hundred prompts with the starting model give counts, and counts success rates.
2. Real runs from that model, as examples/arithmetic_pilot_commit.yaml says: uniform allocation and Pilot-Commit.
3. The gain per group is fitted to one figure: the accuracy of the uniform run at its end, on held-out problems of the
   same kinds. Everything else is predicted: with that gain, and with a policy that does not learn.

Prints predicted beside real: zero-variance share, rollouts per step, useful share, waste by outcome, and
accuracy at the end. `--critical_groups` lets the gain of a step saturate.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import PrinterCallback, ProgressCallback

from rollwise.simulation import Rates, build_allocation, simulate, zero_variance_share
from rollwise.tasks import arithmetic
from rollwise.trl import RollwiseGRPOConfig, RollwiseGRPOTrainer

RECIPE = Path(__file__).parents[1] / "examples" / "arithmetic_pilot_commit.yaml"
METHODS = {"uniform": {"allocation": "uniform"}, "pilot_commit": {"allocation": "pilot_commit"}}
SEEDS = 20  # of the simulated runs


def train(recipe, data, reward, **changes):
    settings = {name: value for name, value in recipe.items() if name in RollwiseGRPOConfig.__dataclass_fields__}
    settings |= {"eval_strategy": "no", "eval_on_start": False, "disable_tqdm": True} | changes
    if settings["allocation"] == "uniform":
        settings = {k: v for k, v in settings.items() if not k.startswith(("pilot_", "p_", "solved_"))}
        settings["drop_zero_variance"] = True  # as with Pilot-Commit
    with tempfile.TemporaryDirectory() as folder:
        trainer = RollwiseGRPOTrainer(
            model=str(arithmetic.model_path()),
            reward_funcs=reward,
            args=RollwiseGRPOConfig(output_dir=folder, **settings),
            train_dataset=data["train"],
            eval_dataset=data["test"],
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.train()
    return trainer


def pilot_counts(recipe, data, num_prompts, pilots):
    """Successes and rollouts of each prompt that was sampled; the policy does not move."""
    correct, total = Counter(), Counter()

    def reward(prompts, completions, **columns):
        rewards = arithmetic.exact_match_reward(prompts=prompts, completions=completions, **columns)
        for prompt, value in zip(prompts, rewards, strict=True):
            correct[str(prompt)] += value == 1.0
            total[str(prompt)] += 1
        return rewards

    batch = recipe["per_device_train_batch_size"]
    steps = -(-num_prompts * pilots // batch)
    train(recipe, data, reward, allocation="uniform", learning_rate=0.0, num_generations=pilots, max_steps=steps)
    return [correct[prompt] for prompt in total], [total[prompt] for prompt in total]


def real_figures(trainer, steps):
    outcomes, generated = trainer.ledger.by_outcome(), trainer.ledger.totals()["rollouts_generated"]
    trainer.evaluate()
    accuracy = trainer.state.log_history[-1]["eval_reward"]
    return figures(outcomes, generated, steps) | {"accuracy_end": float(accuracy)}


def figures(outcomes, generated, steps):
    mixed = outcomes["trained"] + outcomes["zero_variance"]
    return {
        "zero_variance_share": outcomes["zero_variance"] / mixed,
        "rollouts_per_step": generated / steps,
        "useful_share": outcomes["trained"] / generated,
    } | {name: outcomes[name] / generated for name in ("solved", "too_easy", "too_hard")}


def simulated_figures(allocation, rates, steps, gain, critical):
    found = []
    for seed in range(SEEDS):
        pool = rates.sample(8000, np.random.default_rng(seed))
        run = simulate(
            allocation, pool, seed=seed, steps=steps, gain_per_group=gain, critical_groups=critical, engine="counted"
        )
        found.append(figures(run.outcomes, run.rollouts_generated, steps) | {"accuracy_end": float(run.success[-1])})
    return {name: float(np.mean([row[name] for row in found])) for name in found[0]}


def fitted_gain(allocation, rates, steps, accuracy, critical):
    low, high = 0.0, 0.5
    for _ in range(12):
        middle = (low + high) / 2
        found = simulated_figures(allocation, rates, steps, middle, critical)["accuracy_end"]
        low, high = (middle, high) if found < accuracy else (low, middle)
    return (low + high) / 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pilots", type=int, default=8)
    parser.add_argument("--pilot_prompts", type=int, default=768)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--critical_groups", type=float)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)  # the model is too small for more to help
    recipe = yaml.safe_load(RECIPE.read_text())
    levels = recipe["arithmetic_levels"]
    data = arithmetic.load_dataset(num_train=8000, num_test=512, levels=levels)
    group_size = recipe["num_generations"]

    correct, total = pilot_counts(recipe, data, options.pilot_prompts, options.pilots)
    rates = Rates.counted(correct, total)
    pool = rates.sample(None, np.random.default_rng(0))
    print(rates.source)
    print(f"groups of {group_size} without variance at the start: {zero_variance_share(pool, group_size):.3f}")
    print(f"  by the raw shares of the pilots: {zero_variance_share(np.divide(correct, total), group_size):.3f}")

    result, gain = {}, None
    for method, changes in METHODS.items():
        settings = {
            k: recipe[k] for k in ("p_lower", "p_upper", "solved_prompts", "pilot_every_step", "pilot_rollouts")
        }
        prompts = recipe["per_device_train_batch_size"] // group_size
        own = settings if method == "pilot_commit" else {}
        allocation = build_allocation(method, own, train_prompts=prompts, group_size=group_size)
        trainer = train(
            recipe, data, arithmetic.exact_match_reward, max_steps=options.steps, seed=options.seed, **changes
        )
        real = real_figures(trainer, options.steps)
        if gain is None:
            gain = fitted_gain(allocation, rates, options.steps, real["accuracy_end"], options.critical_groups)
        result[method] = {
            "real": real,
            "predicted": simulated_figures(allocation, rates, options.steps, gain, options.critical_groups),
            "predicted_without_learning": simulated_figures(allocation, rates, options.steps, 0.0, None),
        }
        print(f"\n{method:24}{'real':>10}{'predicted':>12}{'without learning':>18}")
        for name in real:
            row = [result[method][kind][name] for kind in ("real", "predicted", "predicted_without_learning")]
            print(f"  {name:22}{row[0]:10.3f}{row[1]:12.3f}{row[2]:18.3f}")
    print(f"\nfitted gain per group: {gain:.4f} logits")
    if options.json:
        options.json.write_text(json.dumps(result | {"gain_per_group": gain}, indent=2) + "\n")


if __name__ == "__main__":
    main()
