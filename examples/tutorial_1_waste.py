"""Tutorial 1: the waste in plain GRPO, made visible.

    python examples/tutorial_1_waste.py

A group whose rewards are all equal has no gradient. With success rate p and G rollouts that happens with probability
p^G + (1 - p)^G. Part one measures the success rates of real prompts under a real (tiny) model and says how much of
plain GRPO would be wasted, by the size of its groups. Part two trains and counts.
"""

import argparse
from collections import defaultdict
from math import comb

from tutorial_tools import generated_by, logged, make_trainer, table

from rollwise.tasks.arithmetic import exact_match_reward

ROLLOUTS = 64  # of each prompt, to know its success rate


def main(steps: int = 20, sampling_steps: int = 4) -> dict[str, float]:
    print(__doc__.partition("\n\n    ")[0])
    right, seen = defaultdict(int), defaultdict(str)

    def reward(prompts, completions, answer, level, **others):
        scores = exact_match_reward(completions, answer)
        for prompt, its_level, score in zip(prompts, level, scores, strict=True):
            right[prompt] += int(score)
            seen[prompt] = its_level
        return scores

    print(f"\nPart one: {ROLLOUTS} rollouts of each prompt, with a learning rate of 0.\n")
    sampling = {"num_generations": ROLLOUTS, "per_device_train_batch_size": 16 * ROLLOUTS, "learning_rate": 0.0}
    make_trainer("sampling", reward=reward, max_steps=sampling_steps, **sampling).train()
    by_level = defaultdict(list)
    for prompt, its_level in seen.items():
        by_level[its_level].append(right[prompt] / ROLLOUTS)
    rates = {level: sum(values) / len(values) for level, values in by_level.items()}
    order = sorted(by_level, key=lambda level: -rates[level])
    table(["level", "prompts", "success rate"], [(level, len(by_level[level]), rates[level]) for level in order])

    # Of n rollouts with c right ones, G taken at random are all alike with this chance: no estimate of p is needed.
    shares = {
        size: sum(comb(c, size) + comb(ROLLOUTS - c, size) for c in (right[prompt] for prompt in seen))
        / (comb(ROLLOUTS, size) * len(seen))
        for size in (4, 8, 16, 32)
    }
    print("Share of groups without any gradient, by the size of a group:\n")
    table(["G", "wasted"], list(shares.items()))
    print("Larger groups waste less and cost more. Most waste is at the ends: solved and hopeless prompts.\n")

    print(f"Part two: {steps} steps of plain GRPO with groups of 16.\n")
    trainer = make_trainer("plain GRPO", max_steps=steps)
    trainer.train()
    outcomes = generated_by(trainer, "outcome")
    total = sum(outcomes.values())
    table(["what became of the rollouts", "rollouts", "share"], [(n, c, c / total) for n, c in outcomes.items()])
    wasted = outcomes.get("zero_variance", 0) / total
    success = logged(trainer, "success_rate")
    print(f"{wasted:.0%} of what was generated moved nothing (predicted for the first step: {shares[16]:.0%}).")
    print(f"Success on the prompts it trained on went from {success[0]:.2f} to {success[-1]:.2f}.")
    print("Next: tutorial_2_pilot_commit.py asks a few rollouts first.")
    return {"predicted": shares[16], "wasted": wasted, "wasted_of_4": shares[4], "rollouts": total}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The waste in plain GRPO")
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
