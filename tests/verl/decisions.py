"""One small run whose rewards are written beforehand, for both engines: same rewards, same decisions.

A rollout's reward depends on its prompt and on how many rollouts the prompt has had before, whatever the model wrote.
"""

import hashlib
import json
from pathlib import Path

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
    count = _counts[prompt] = _counts.get(prompt, 0) + 1
    rate = _fraction(prompt) * 1.4 - 0.2  # some prompts are hopeless, some are solved
    return float(_fraction(f"{prompt}#{count}") < rate)


def forget_rewards():
    """Begin anew."""
    _counts.clear()


def _fraction(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) / 2**32


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """verl's signature; the prompt comes as the ground truth."""
    reward = next_reward(ground_truth)
    return {"score": reward, "acc": reward}


def reward_function(prompts, **kwargs):
    """TRL's signature."""
    return [next_reward(prompt) for prompt in prompts]


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
