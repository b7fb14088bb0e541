"""One small run whose rewards are written beforehand, for both engines: same rewards, same decisions.

A rollout's reward depends on its prompt and on how many rollouts the prompt has had before, whatever the model wrote.
"""

import functools
import hashlib
import json
import os
from pathlib import Path

from rollwise.tasks.arithmetic import generate_problems

STEPS = 5
NUM_PROMPTS = 48
TRAIN_PROMPTS = 4
ROLLOUTS = 6
ALLOCATION = {"pilot_rollouts": 2, "p_upper": 0.9, "max_survivor_age_steps": 2}
REPLAY = {"ratio": 0.5, "warmup_steps": 1, "max_age_steps": 2}
SEED = 5
FILE = Path(__file__).parent / "decisions.json"

_counts = {}


def next_reward(prompt):
    """Reward of the prompt's next rollout."""
    if not _counts and os.environ.get("DECISIONS_FROM"):
        _counts[""] = 0  # looked up
        _counts.update(_counts_of_earlier_steps())
    count = _counts[prompt] = _counts.get(prompt, 0) + 1
    rate = _fraction(prompt) * 1.4 - 0.2  # some prompts are hopeless, some are solved
    return float(_fraction(f"{prompt}#{count}") < rate)


def _counts_of_earlier_steps():
    """How many rollouts each prompt had before the step that a resumed run begins with."""
    counts = {}
    for line in Path(os.environ["DECISIONS_FROM"]).read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "tell" and event["step"] < int(os.environ["DECISIONS_STEPS"]):
            for rollout in event["rollouts"]:
                prompt = _problems()[rollout["prompt"]]
                counts[prompt] = counts.get(prompt, 0) + 1
    return counts


def forget_rewards():
    """Begin anew."""
    _counts.clear()


def _fraction(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) / 2**32


def next_reward_of(prompt_id):
    """The same by the prompt's row; in place of verl's rewards, whose calls come in no certain order."""
    return next_reward(_problems()[prompt_id])


@functools.cache
def _problems():
    return [problem.prompt for problem in generate_problems(NUM_PROMPTS, seed=0, levels=("sort-3",))]


def reward_function(prompts, **kwargs):
    """TRL's signature."""
    return [next_reward(prompt) for prompt in prompts]


def verl_overrides():
    """Hydra overrides of this run."""
    return [
        "rollwise.allocation.name=pilot_commit",
        *(f"+rollwise.allocation.{name}={value}" for name, value in ALLOCATION.items()),
        *(f"rollwise.replay.{name}={value}" for name, value in REPLAY.items()),
        f"rollwise.seed={SEED}",
        "rollwise.poll_seconds=0.1",
        "actor_rollout_ref.actor.optim.lr=3e-4",
    ]


def verl_settings():
    """Arguments of `launch.overrides` for this run."""
    return {"steps": STEPS, "prompts": TRAIN_PROMPTS, "rollouts": ROLLOUTS, "max_tokens": 4}


def decisions(events):
    """What was decided, of recorded events: the requests, and the rows of each batch by the rollouts' numbers."""
    asked = [[event["step"], event["requests"]] for event in events if event["kind"] == "ask" and event["requests"]]
    rows = [
        [event["step"], [[row["number"], row["prompt"], row["reward"], row["source"]] for row in event["rows"]]]
        for event in events
        if event["kind"] == "batch"
    ]
    sizes = [[event["step"], event["normalizer_rows"]] for event in events if event["kind"] == "batch"]
    return {"asked": asked, "rows": rows, "sizes": sizes}


def expected():
    return json.loads(FILE.read_text())
