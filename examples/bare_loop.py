"""GRPO with Rollwise and without a trainer: plain PyTorch and transformers around ask, tell and batch.

    python examples/bare_loop.py             # Pilot-Commit and replay, about a minute on a CPU
    python examples/bare_loop.py --plain     # the same loop as plain GRPO

Trains the embedded arithmetic model; nothing is downloaded. Read `train` first: the rest is what any GRPO loop has.
"""

import argparse

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollwise import Batch, PilotCommit, Replay, Request, Rollout, RolloutScheduler, Uniform
from rollwise.diagnostics import row_entries
from rollwise.tasks import arithmetic

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def train(steps: int, seed: int, plain: bool) -> tuple[float, float, dict[str, int]]:
    """Returns the held-out accuracy before and after, and what became of the rollouts."""
    torch.manual_seed(seed)
    policy = Policy()
    problems = arithmetic.generate_problems(8_000, seed=seed, split="train")
    allocation = PilotCommit(train_prompts=16, pilot_rollouts=4, commit_rollouts=12, solved_prompts="next_epoch")
    scheduler = RolloutScheduler(
        range(len(problems)),  # a prompt's id: its place in the list
        allocation=Uniform(train_prompts=16, num_rollouts=16) if plain else allocation,
        replay=None if plain else Replay(ratio=1.0, warmup_steps=3),
        seed=seed,
    )
    before = policy.accuracy()
    progress = tqdm(range(steps), unit="step")
    for _ in progress:
        while requests := scheduler.ask():  # what to generate next; empty once the batch is complete
            scheduler.tell(policy.rollouts(requests, problems))
        batch = scheduler.batch()  # fresh rows, then replayed ones, each with its advantage
        if batch.rows:
            scheduler.feedback(staleness=policy.update(batch))  # optional: for the KL clock and tau "auto"
        if scheduler.stop_reason:
            progress.write(scheduler.stop_reason)
            break
        generated = scheduler.ledger.totals()["rollouts_generated"]
        progress.set_postfix_str(f"success {batch.success_rate:.2f}, rows {len(batch.rows)}, rollouts {generated:,}")
    return before, policy.accuracy(), scheduler.ledger.totals()


class Policy:
    """A causal language model that answers prompts and takes a step of clipped policy gradient."""

    def __init__(self) -> None:
        path = str(arithmetic.model_path())
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()  # no dropout: one policy, one log-prob
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)

    @torch.no_grad()
    def generate(self, prompts: list[str]) -> list[torch.Tensor]:
        """A sampled completion of each prompt, with the end-of-sequence token where there is one."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)  # on the left
        output = self.model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=arithmetic.MAX_COMPLETION_TOKENS)
        completions = output[:, inputs["input_ids"].shape[1] :]
        has_ended = (completions == self.tokenizer.eos_token_id).cumsum(1) > 0
        lengths = 1 + (~has_ended[:, :-1]).sum(1)  # up to the first end, that one included
        return [completion[:n] for completion, n in zip(completions, lengths.tolist(), strict=True)]

    def log_probs(self, sequences: list[np.ndarray]) -> torch.Tensor:
        """Log-prob of every token but the first, shape (B, T - 1); sequences are padded on the right."""
        ids_BT = pad_sequence([torch.from_numpy(ids).long() for ids in sequences], batch_first=True)
        logits = self.model(ids_BT[:, :-1]).logits.float()
        return torch.log_softmax(logits, dim=-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)

    def rollouts(self, requests: list[Request], problems: list[arithmetic.Problem]) -> list[Rollout]:
        """Answer the scheduler's requests, in their order."""
        asked = [request.prompt_id for request in requests for _ in range(request.num_rollouts)]
        completions = self.generate([problems[i].prompt for i in asked])
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        rewards = arithmetic.exact_match_reward(texts, [problems[i].answer for i in asked])
        prompts = [self.tokenizer(problems[i].prompt)["input_ids"] for i in asked]
        ids = [np.array(p + c.tolist(), dtype=np.int32) for p, c in zip(prompts, completions, strict=True)]
        with torch.no_grad():  # of the policy that generated them: stored, and never computed anew
            log_probs = [row[: len(i) - 1].numpy() for row, i in zip(self.log_probs(ids), ids, strict=True)]
        told = zip(asked, rewards, ids, log_probs, completions, strict=True)
        return [Rollout(i, r, {"ids": all_ids, "log_probs": old}, len(new)) for i, r, all_ids, old, new in told]

    def update(self, batch: Batch) -> np.ndarray:
        """One optimizer step on the batch; returns how far each row's policy was from its behaviour policy."""
        payloads = [row.rollout.payload for row in batch.rows]
        log_probs_BT = self.log_probs([payload["ids"] for payload in payloads])
        old_BT = pad_sequence([torch.from_numpy(payload["log_probs"]) for payload in payloads], batch_first=True)
        ends_B1 = torch.tensor([[len(payload["log_probs"])] for payload in payloads])
        starts_B1 = ends_B1 - torch.tensor([[row.rollout.num_tokens] for row in batch.rows])
        place_T = torch.arange(old_BT.shape[1])
        mask_BT = (starts_B1 <= place_T) & (place_T < ends_B1)  # the completions
        advantages_B1 = torch.tensor([[row.advantage * row.weight] for row in batch.rows])
        ratios_BT = (log_probs_BT - old_BT).exp()
        gains_BT = ratios_BT * advantages_B1
        bounds_BT = ratios_BT.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages_B1
        loss = -(torch.minimum(gains_BT, bounds_BT) * mask_BT).sum() / batch.normalizer_tokens
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        ages_B = [row.age_steps for row in batch.rows]
        return row_entries(ages_B, (log_probs_BT - old_BT).detach(), mask_BT, gains_BT > bounds_BT)

    def accuracy(self, answers: int = 4) -> float:
        """Share of right answers to the held-out problems."""
        problems = arithmetic.held_out_problems(256) * answers
        texts = self.tokenizer.batch_decode(self.generate([p.prompt for p in problems]), skip_special_tokens=True)
        return float(np.mean(arithmetic.exact_match_reward(texts, [p.answer for p in problems])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO with Rollwise and without a trainer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="uniform allocation, no replay")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for more to help
    before, after, totals = train(options.steps, options.seed, options.plain)
    print(f"held-out accuracy {before:.3f} -> {after:.3f} with {totals['rollouts_generated']:,} rollouts")
    print({name: count for name, count in totals.items() if count})
