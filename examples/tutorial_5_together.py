"""Tutorial 5: putting it together.

    python examples/tutorial_5_together.py

Plain GRPO, replay, Pilot-Commit, and both, each with the same budget of generated rollouts, measured on held-out
problems. Each arm trains at the same learning rate here, which a real comparison must not do: tune it for each.
"""

import argparse
import time

from tutorial_tools import accuracy, logged, make_trainer, table

REPLAY = {"replay_ratio": 1.0, "replay_warmup_steps": 3}
PILOT_COMMIT = {"allocation": "pilot_commit", "solved_prompts": "next_epoch", "pilot_every_step": False}
ARMS = {"plain GRPO": {}, "replay": REPLAY, "Pilot-Commit": PILOT_COMMIT, "both": PILOT_COMMIT | REPLAY}


def main(budget: int = 4_000, arms: tuple[str, ...] = tuple(ARMS)) -> dict[str, dict[str, float]]:
    print(__doc__.partition("\n\n    ")[0])
    print(f"\n{budget:,} rollouts each.\n")
    results = {}
    start = None
    for arm in arms:
        trainer = make_trainer(arm, max_steps=1_000, budget_rollouts=budget, **ARMS[arm])
        if start is None:
            start = accuracy(trainer)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
        totals = trainer.ledger.totals()
        results[arm] = {
            "accuracy": accuracy(trainer),
            "rollouts": totals["rollouts_generated"],
            "useful": trainer.scheduler.metrics()["useful_share"],
            "replayed": totals["rows_replayed"],
            "steps": trainer.state.global_step,
            "seconds": seconds,
            "trained on": sum(map(int, logged(trainer, "step_rows_fresh"))) + totals["rows_replayed"],
        }
    print(f"Held-out accuracy at the start: {start:.3f}\n")
    headings = ["arm", "accuracy", "rollouts", "useful share", "rows replayed", "steps", "seconds", "rows trained on"]
    table(headings, [(arm, *figures.values()) for arm, figures in results.items()])
    print("""What this is and is not
- The budgets are equal in *generated* rollouts; the last column says how many rows the updates were made of. Replay
  trains on more, so part of its gain is that of more training: a fair study also has plain GRPO with as much of it.
- One seed, one small task, differences of a few hundredths: noise. `rollwise study` runs methods times seeds and gives
  intervals; docs/results has two such studies.
- Where generation is most of the cost, as with long answers, rollouts are what counts. Here an update costs as much.
Next: tutorial_6_simulate.py asks what a method would cost before anything is spent.""")
    return results | {"start": {"accuracy": start}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Replay and Pilot-Commit together")
    parser.add_argument("--budget", type=int, default=4_000, help="rollouts of each arm")
    main(parser.parse_args().budget)
