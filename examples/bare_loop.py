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
    scheduler = RolloutScheduler(
        range(len(problems)),  # a prompt's id: its place in the list
        allocation=Uniform(train_prompts=16, num_rollouts=16)
        if plain
        else PilotCommit(train_prompts=16, pilot_rollouts=4, commit_rollouts=12, solved_prompts="next_epoch"),
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
        length = arithmetic.MAX_COMPLETION_TOKENS
        output = self.model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=length)
        completions = output[:, inputs["input_ids"].shape[1] :]
        ends = (completions == self.tokenizer.eos_token_id).float().cumsum(1)
        lengths = 1 + ((ends == 0)[:, :-1]).sum(1)  # up to the first end, that one included
        return [completion[:n] for completion, n in zip(completions, lengths.tolist(), strict=True)]

    def log_probs(self, ids: list[torch.Tensor]) -> torch.Tensor:
        """Log-prob of every token but the first, shape (B, T - 1); sequences are padded on the right."""
        ids_BT = pad_sequence(ids, batch_first=True)
        logits = self.model(ids_BT[:, :-1]).logits.float()
        return torch.log_softmax(logits, dim=-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)

    def rollouts(self, requests: list[Request], problems: list[arithmetic.Problem]) -> list[Rollout]:
        """Answer the scheduler's requests, in their order."""
        ids = [request.prompt_id for request in requests for _ in range(request.num_rollouts)]
        completions = self.generate([problems[i].prompt for i in ids])
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        rewards = arithmetic.exact_match_reward(texts, [problems[i].answer for i in ids])
        prompts = [torch.tensor(self.tokenizer(problems[i].prompt)["input_ids"]) for i in ids]
        tokens = [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
        with torch.no_grad():  # of the policy that generated them: stored, and never computed anew
            log_probs_BT = self.log_probs(tokens)
        return [
            Rollout(
                prompt_id,
                reward=reward,
                num_tokens=len(completion),
                payload={
                    "ids": sequence.numpy().astype(np.int32),
                    "logps": row[len(sequence) - len(completion) - 1 : len(sequence) - 1].numpy(),
                },
            )
            for prompt_id, reward, completion, sequence, row in zip(
                ids, rewards, completions, tokens, log_probs_BT, strict=True
            )
        ]

    def update(self, batch: Batch) -> np.ndarray:
        """One optimizer step on the batch; returns how far each row's policy was from its behaviour policy."""
        payloads = [row.rollout.payload for row in batch.rows]
        new_BT = self.log_probs([torch.from_numpy(p["ids"]).long() for p in payloads])
        old_BT, mask_BT = new_BT.detach().clone(), torch.zeros_like(new_BT, dtype=torch.bool)
        for i, payload in enumerate(payloads):
            tokens = slice(len(payload["ids"]) - len(payload["logps"]) - 1, len(payload["ids"]) - 1)
            old_BT[i, tokens], mask_BT[i, tokens] = torch.from_numpy(payload["logps"]), True
        advantages_B1 = torch.tensor([[row.advantage * row.weight] for row in batch.rows])
        ratios_BT = (new_BT - old_BT).exp()
        clipped_BT = ratios_BT.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        loss_BT = -torch.minimum(ratios_BT * advantages_B1, clipped_BT * advantages_B1)
        loss = (loss_BT * mask_BT).sum() / batch.normalizer_tokens
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        is_cut_BT = ratios_BT * advantages_B1 > clipped_BT * advantages_B1
        return row_entries([row.age_steps for row in batch.rows], (new_BT - old_BT).detach(), mask_BT, is_cut_BT)

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
