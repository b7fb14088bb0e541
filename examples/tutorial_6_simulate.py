"""Tutorial 6: simulate before you spend.

    python examples/tutorial_6_simulate.py

How much a method saves depends on how hard your prompts are for your model. A few rollouts of a few hundred prompts
say that; the simulator then plays whole runs with the real scheduler and a policy without a model, in seconds.
"""

import argparse
from collections import Counter

import numpy as np
from tutorial_tools import make_trainer, table

from rollwise.simulation import Rates, build_allocation, estimate_rates, simulate, zero_variance_share
from rollwise.tasks.arithmetic import exact_match_reward

PILOTS = 8


def main(pilot_steps: int = 4, steps: int = 40) -> dict[str, object]:
    print(__doc__.partition("\n\n    ")[0])
    right, total = Counter(), Counter()

    def reward(prompts, completions, answer, **others):
        scores = exact_match_reward(completions, answer)
        for prompt, score in zip(prompts, scores, strict=True):
            total[prompt] += 1
            right[prompt] += int(score)
        return scores

    print(f"\nPart one: {PILOTS} rollouts of each of {64 * pilot_steps} prompts, with a learning rate of 0.\n")
    settings = {"num_generations": PILOTS, "per_device_train_batch_size": 64 * PILOTS, "learning_rate": 0.0}
    make_trainer("pilots", reward=reward, max_steps=pilot_steps, **settings).train()
    correct_P = np.array([right[prompt] for prompt in total])
    total_P = np.array([total[prompt] for prompt in total])
    histogram = Counter((correct_P * PILOTS // total_P).tolist())
    table(["right of 8", "prompts"], [(k, histogram[k]) for k in range(PILOTS + 1)])
    a, b = estimate_rates(correct_P, total_P)
    print(f"""A Beta({a:.3f}, {b:.3f}) fits these counts. Prompts without a success are not all hopeless: a rate of 0.1
shows none in {PILOTS} with probability {0.9**PILOTS:.2f}. So rates are drawn from each prompt's posterior.
""")

    pool = 4_000
    rng = np.random.default_rng(0)
    rates_P = rng.choice(Rates.counted(correct_P, total_P).sample(None, rng), size=pool)
    print(f"Part two: {steps} steps of 32 prompts with groups of 16, from a pool of {pool:,} such prompts.\n")
    methods = {
        "uniform": {},
        "dynamic_sampling": {},
        "pilot_commit": {},
        "belief": {},
    }
    figures = {}
    for name, own in methods.items():
        run = simulate(build_allocation(name, own, train_prompts=32), rates_P, steps=steps, gain_per_group=1e-3)
        generated = run.rollouts_generated
        figures[name] = {
            "a step": generated / run.steps,
            "useful": run.outcomes["trained"] / generated,
            "a group": generated / max(1, int(run.groups[-1])),
            "success": float(run.success[-1]),
        }
    table(
        ["method", "rollouts a step", "useful share", "rollouts per trained group", "mean success at the end"],
        [(name, *values.values()) for name, values in figures.items()],
    )
    predicted = zero_variance_share(rates_P, 16)
    print(f"Without simulating anything: {predicted:.0%} of groups of 16 would have no variance at the start.")
    print("""
Costs and shares follow from the rates alone, and hold. What a group is *worth* is the model's assumption
(gain_per_group, and critical_groups for batches that are large already): read docs/simulate.md before you believe a
success at the end.
The same from the command line, with your counts in a file:

    rollwise simulate --rates counts.csv --methods uniform pilot_commit belief --html costs.html""")
    return {"figures": figures, "predicted": predicted, "prompts": len(total)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Simulate before you spend")
    parser.add_argument("--steps", type=int, default=40, help="simulated steps of each method")
    main(steps=parser.parse_args().steps)
