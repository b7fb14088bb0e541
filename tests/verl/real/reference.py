"""What a step's gradient should be: row by row, unpadded, from the recorded weights, tokens and rewards alone."""

import math
from collections import defaultdict

import torch
from real.samples import plain_inputs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

STD_EPSILON = 1e-6
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.8, 1.2, 3.0


class Reference:
    """Reads a recorded run.

    Args:
        run: The run, with what it recorded.
        model_path: Its model's folder, for the architecture.
        model_class: Of the model.
        inputs_of: What the model takes for some tokens.
    """

    def __init__(self, run, model_path, *, model_class=AutoModelForCausalLM, inputs_of=plain_inputs):
        self._run, self._inputs_of = run, inputs_of
        self._model = model_class.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
        self._weights = {}
        self.advantages = self._group_advantages()

    def _group_advantages(self):
        """Advantage of each rollout, by its number, relative to all that came for its prompt since its pilots."""
        groups, advantages = {}, {}
        for event in self._run.events:
            if event["kind"] == "tell":
                for rollout in event["rollouts"]:
                    if rollout["purpose"] != "commit" and not (
                        groups.get(rollout["prompt"]) and groups[rollout["prompt"]][0] == event["step"]
                    ):
                        groups[rollout["prompt"]] = (event["step"], [])
                    groups[rollout["prompt"]][1].append(rollout)
            if event["kind"] == "batch":
                for row in event["rows"]:
                    if row["source"] == "replay" or row["number"] in advantages:
                        continue
                    members = [r for r in groups[row["prompt"]][1] if math.isfinite(r["reward"])]
                    rewards = torch.tensor([r["reward"] for r in members], dtype=torch.float64)
                    scaled = (rewards - rewards.mean()) / (rewards.std() + STD_EPSILON)
                    advantages |= {r["number"]: float(a) for r, a in zip(members, scaled, strict=True)}
        return advantages

    def _load(self, version):
        if version not in self._weights:
            self._weights[version] = load_file(self._run.folder / f"weights-{version}.safetensors")
        self._model.load_state_dict(self._weights[version], strict=False)

    def _log_probs(self, row):
        """Per model row of the rollout: log-probs of its response tokens, and their mask."""
        start_p = start_r = 0
        for prompt_length, length in zip(row["prompt_lengths"], row["response_lengths"], strict=True):
            prompt = row["prompt_ids"][start_p : start_p + prompt_length]
            response = row["response_ids"][start_r : start_r + length]
            mask = row["response_mask"][start_r : start_r + length]
            logits = self._model(**self._inputs_of(prompt + response)).logits[0, prompt_length - 1 : -1]
            log_probs = torch.log_softmax(logits, -1)[range(length), response]
            yield log_probs, torch.tensor(mask, dtype=torch.bool)
            start_p, start_r = start_p + prompt_length, start_r + length

    def behaviour_log_probs(self, rows):
        """By a rollout's number: what the policy that generated it makes of its tokens."""
        by_version = defaultdict(list)
        for row in rows:
            by_version[row["birth_step"]].append(row)
        found = {}
        for version, members in by_version.items():
            self._load(version)
            with torch.no_grad():
                found |= {row["number"]: [x for x, _ in self._log_probs(row)] for row in members}
        return found

    def gradient(self, batch, *, divide="tokens", correction="ratio"):
        """Gradient of the policy loss over a recorded batch, by parameter.

        Args:
            batch: The event.
            divide: "tokens": the loss is the mean over loss tokens; "rows": the mean over rows of their means.
            correction: "ratio": clipped ratio to the behaviour policy. "weights": to the current policy, weighed by
                min(2, current / behaviour).
        """
        rows = batch["rows"]
        behaviour = self.behaviour_log_probs(rows)
        self._load(batch["step"])
        self._model.zero_grad()
        normalizer = batch["normalizer_tokens"] if divide == "tokens" else batch["normalizer_rows"]
        for row in rows:
            advantage = self.advantages[row["number"]] * row["weight"]
            for (log_probs, mask), old in zip(self._log_probs(row), behaviour[row["number"]], strict=True):
                ratio = (log_probs - (old if correction == "ratio" else log_probs.detach())).exp()
                loss = -torch.minimum(ratio * advantage, ratio.clamp(CLIP_LOW, CLIP_HIGH) * advantage)
                if advantage < 0:
                    loss = loss.clamp(max=-advantage * DUAL_CLIP)
                if correction == "weights":
                    loss = loss * (log_probs.detach() - old).exp().clamp(max=2.0)
                loss = loss[mask].sum() if divide == "tokens" else loss[mask].mean()
                (loss / normalizer).backward()
        return {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}


def relative_error(actual, expected):
    """Norm of the difference over the norm of what is expected, over all parameters."""
    assert actual.keys() == expected.keys()
    difference = sum(float((actual[name] - expected[name]).double().pow(2).sum()) for name in expected)
    return math.sqrt(difference / sum(float(tensor.double().pow(2).sum()) for tensor in expected.values()))


def recorded_gradients(run):
    """By the number of the optimizer's step."""
    paths = sorted(run.folder.glob("gradient-*.safetensors"), key=lambda path: int(path.stem.split("-")[1]))
    return [load_file(path) for path in paths]
