"""Runs as they lie on the disk, made up, for reports."""

import json
import math

import yaml

from rollwise.ledger import Ledger
from rollwise.records.metrics import ACCURACY
from rollwise.records.summary import LEDGER, METRICS, SUMMARY
from rollwise.rollout import Rollout
from rollwise.study.run import DONE, RECIPE, RUN

PER_STEP = 100


def metrics(steps, *, eval_every=10, ends=0.5, replay=True, pool=True):
    """Rows as a run of `steps` steps logs them: accuracy rises evenly from .2 to `ends`."""
    rows = []
    for step in range(steps + 1):
        row = {"step": step, "seconds": 2.0 * step, "rollouts_generated": PER_STEP * step}
        if step:
            logged = {
                "rollwise/success_rate": 0.3 + 0.2 * math.sin(step),
                "rollwise/tokens_generated": 1000.0 * step,
                "rollwise/rollouts_generated": float(PER_STEP * step),
                "rollwise/rollouts_trained": 60.0 * step,
                "rollwise/rollouts_pending": 0.0,
                "rollwise/rollouts_wasted": 40.0 * step,
                "rollwise/rows_replayed": 30.0 * step,
                "completions/mean_length": 6.0 + math.cos(step),
            }
            if pool:
                logged |= {"rollwise/live_prompts": 1000.0 - step, "rollwise/retired_prompts": float(step)}
                logged |= {"rollwise/survivors_waiting": 5.0, "rollwise/epoch": step // 50}
            if replay:
                logged |= {"rollwise/age_mean": 3.0, "rollwise/age_max": 9.0}
                logged |= {
                    f"rollwise/ess_token/age_{age}": 1 - i / 10 for i, age in enumerate(("0", "1", "2-3", "4-7"))
                }
            rows.append(row | logged | {"epoch": step / 1000})
        if step % eval_every == 0:
            rows.append(row | {ACCURACY: 0.2 + (ends - 0.2) * step / steps, "eval_loss": 0.1})
    return rows


def ledger(steps, *, replayed=30):
    """A ledger in which each step trains on 60 of 100 rollouts, 30 have no variance, 10 are too hard."""
    counts = Ledger()
    for step in range(steps):
        for outcome, number in (("trained", 60), ("zero_variance", 30), ("too_hard", 10)):
            rollouts = [Rollout(0, 1.0, num_tokens=10, birth_step=step) for _ in range(number)]
            counts.record(rollouts)
            counts.settle(rollouts, outcome)
        if replayed:
            counts.record_replayed(step, rollouts[:1] * replayed)
    return counts


def leave_run(folder, *, steps=20, seed=0, settings=(), status="finished", counts=None, rows=None, **changes):
    """Write the folder of a run of `rollwise train`; a `running` one has no totals and no ledger."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = metrics(steps, **changes) if rows is None else rows
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = {"max_steps": steps, "seed": seed, "output_dir": str(folder), "allocation": "uniform"} | dict(settings)
    summary = {"status": status, "seed": seed, "settings": known, "versions": {"python": "3.11", "rollwise": "1"}}
    if status != "running":
        counts = ledger(steps) if counts is None else counts
        counts.save(folder / LEDGER)
        summary |= {"stop_reason": None, "steps": steps, "seconds": 2.0 * steps} | counts.totals()
    (folder / SUMMARY).write_text(json.dumps(summary))
    return folder


def leave_study_run(study, arm, seed, *, done=True, **options):
    """Write the folder of a run of a study; one that is not done works in `train/`."""
    folder = study / arm / f"seed-{seed}"
    folder.mkdir(parents=True)
    leave_run(folder if done else folder / "train", seed=seed, status="finished" if done else "running", **options)
    (folder / RUN).write_text(json.dumps({"arm": arm, "seed": seed, "study": study.name, "commit": "abc"}))
    (folder / RECIPE).write_text(yaml.safe_dump({"max_steps": options.get("steps", 20), "seed": seed}))
    if done:
        (folder / DONE).write_text("{}")
    return folder
