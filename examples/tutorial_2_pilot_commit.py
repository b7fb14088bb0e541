"""Tutorial 2: Pilot-Commit's triage.

    python examples/tutorial_2_pilot_commit.py

Each prompt gets a few pilots. Those that all pilots solve, nearly all, or none, are left alone; the others get the
rest of their group. Here the same budget of rollouts is spent by plain GRPO and by Pilot-Commit, and by Pilot-Commit
with other thresholds, and the ledger says where it went.
"""

import argparse

from tutorial_tools import generated_by, make_trainer, table

LAZY = {"allocation": "pilot_commit", "solved_prompts": "next_epoch", "pilot_every_step": False}
ARMS = {
    "plain GRPO": {"allocation": "uniform"},
    "Pilot-Commit": LAZY,  # pilots a new round only while too few survivors wait
    "without thresholds": LAZY | {"p_lower": 0.0, "p_upper": 1.0},
}


def main(budget: int = 5_000) -> dict[str, dict[str, float]]:
    print(__doc__.partition("\n\n    ")[0])
    print(f"\nEach arm ends once {budget:,} rollouts have been generated.\n")
    shares = {}
    outcomes_of = {}
    for arm, settings in ARMS.items():
        trainer = make_trainer(arm, max_steps=1_000, budget_rollouts=budget, **settings)
        trainer.train()
        outcomes = generated_by(trainer, "outcome")
        total = sum(outcomes.values())
        outcomes_of[arm] = {name: count / total for name, count in outcomes.items()}
        shares[arm] = {
            "useful": trainer.scheduler.metrics()["useful_share"],
            "steps": trainer.state.global_step,
            "rollouts": total,
        }
        if arm == "Pilot-Commit":
            purposes = generated_by(trainer, "purpose")

    print("What became of the rollouts, as shares:\n")
    names = sorted({name for outcomes in outcomes_of.values() for name in outcomes})
    table(["arm", *names], [(arm, *(outcomes_of[arm].get(n, "-") for n in names)) for arm in ARMS])
    print("""trained: reached a gradient. solved, too_easy, too_hard: pilots of prompts that were left alone, which
is all that they cost. surplus: of survivors the batch had no room for. pending: they wait for the next step.
""")
    table(["arm", "useful share", "steps", "rollouts"], [(arm, *figures.values()) for arm, figures in shares.items()])
    print(f"Of Pilot-Commit's rollouts {purposes['pilot']:,} were pilots and {purposes.get('commit', 0):,} commits.")
    print("""A hopeless prompt costs plain GRPO a whole group, and Pilot-Commit its pilots. Without thresholds hopeless
prompts survive too, get whole groups, and these have no variance. What is saved depends on how many prompts are
hopeless or solved, and on how few pilots show it. Next: tutorial_3_replay.py.""")
    return shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Pilot-Commit's triage")
    parser.add_argument("--budget", type=int, default=5_000, help="rollouts of each arm")
    main(parser.parse_args().budget)
