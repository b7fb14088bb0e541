"""Tutorial 3: replay, and what age is.

    python examples/tutorial_3_replay.py

Replay keeps the rollouts that were trained on for some steps, and draws some of them into later batches. A rollout's
age is the number of steps since the policy that generated it was current. This trains with replay, shows what the
batches are made of, and then draws from the buffer by hand, with and without decay.
"""

import argparse
from collections import Counter

import numpy as np
from tutorial_tools import logged, make_trainer, table

from rollwise import Replay, ReplayBuffer

MAX_AGE_STEPS = 10


def main(steps: int = 25) -> dict[str, object]:
    print(__doc__.partition("\n\n    ")[0])
    print(f"\nPart one: {steps} steps with one replayed row per fresh one, at most {MAX_AGE_STEPS} steps old.\n")
    settings = {"replay_ratio": 1.0, "replay_max_age_steps": MAX_AGE_STEPS, "replay_warmup_steps": 3}
    trainer = make_trainer("replay", max_steps=steps, **settings)
    drawn = Counter()
    batch = trainer.scheduler.batch

    def watched_batch():
        made = batch()
        drawn.update(row.age_steps for row in made.rows if row.source == "replay")
        return made

    trainer.scheduler.batch = watched_batch
    trainer.train()
    names = ("step_rows_fresh", "step_rows_replayed", "buffer_rollouts")
    columns = [logged(trainer, name) for name in names]
    ages = dict(zip(range(steps - len(logged(trainer, "age_mean")), steps), logged(trainer, "age_mean"), strict=True))
    shown = [step for step in (0, 2, 3, 5, 10, 15, 20, steps - 1) if step < steps]
    table(
        ["step", "fresh rows", "replayed rows", "in the buffer", "mean age"],
        [(step, *(int(column[step]) for column in columns), ages.get(step, "-")) for step in dict.fromkeys(shown)],
    )
    print("""Fresh rows are those with a gradient: groups with equal rewards have left. In the first 3 steps nothing is
replayed. Replayed rows cost no generation; what they cost is a larger update.
""")

    print("Part two: how often each age was drawn, over the run, and the bound that was checked at each draw.\n")
    total = max(1, drawn.total())
    table(["age in steps", "drawn", "share"], [(age, drawn[age], drawn[age] / total) for age in sorted(drawn)])

    print("Part three: what decay would do to this very buffer, with P(i) ~ (|A_i| exp(-age_i / tau))^0.5.\n")
    held = trainer.scheduler.buffer.rollouts
    now = trainer.scheduler.step + 1
    shares = {}
    for tau in (None, 10.0, 3.0, 1.0):
        buffer = ReplayBuffer(Replay(max_age_steps=MAX_AGE_STEPS, decay_tau_steps=tau))
        for birth in sorted({rollout.birth_step for rollout in held}):
            buffer.insert([rollout for rollout in held if rollout.birth_step == birth])
        buffer.evict(now)
        rng = np.random.default_rng(0)
        found = Counter(now - r.birth_step for _ in range(50) for r in buffer.draw(min(64, len(buffer)), now, rng))
        shares[tau] = {age: count / found.total() for age, count in found.items()}
    ages_held = sorted({age for share in shares.values() for age in share})
    table(
        ["age", *("no decay" if tau is None else f"tau {tau:g}" for tau in shares)],
        [(age, *(share.get(age, 0.0) for share in shares.values())) for age in ages_held],
    )
    print("An age bound cuts; decay leans. Both can be on together. Next: tutorial_4_ess_and_tau.py.")
    return {"drawn": drawn, "shares": shares, "fresh": columns[0], "replayed": columns[1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Replay, and what age is")
    parser.add_argument("--steps", type=int, default=25)
    main(parser.parse_args().steps)
