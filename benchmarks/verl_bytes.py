"""What a rollout costs with verl, in bytes: on the driver, in the store, in TransferQueue; and what that comes to.

    python benchmarks/verl_bytes.py

Measured on rows of the given lengths; needs torch, and neither verl nor Ray.
"""

import argparse
import tracemalloc

import torch

from rollwise import Replay, ReplayBuffer, Rollout
from rollwise.verl.rows import nbytes, stored_nbytes, to_arrays, to_rows
from rollwise.verl.stores import Handle

#: What verl's stages add to each response token of a row: old_log_probs, entropy, advantages, returns (float32).
STAGE_BYTES = 16


def row(prompt_tokens, response_tokens):
    return {
        "prompts": torch.arange(prompt_tokens),
        "responses": torch.arange(response_tokens),
        "response_mask": torch.ones(response_tokens, dtype=torch.int64),
        "rollout_log_probs": torch.zeros(response_tokens),
        "rm_scores": torch.zeros(response_tokens),
        "num_turns": 2,
    }


def driver_bytes(num_rollouts=100_000):
    """Of a stored rollout whose rows are in a shard."""
    released = []
    buffer = ReplayBuffer(Replay(capacity_rollouts=num_rollouts, capacity_bytes=1 << 60))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(num_rollouts // 1000):
        rollouts = [
            Rollout(i, 0.5, Handle(1000 * step + i, released), num_tokens=4096 + i, nbytes=50_000 + i, owner=i % 8)
            for i in range(1000)
        ]
        for i, rollout in enumerate(rollouts):
            rollout.birth_step, rollout.advantage = step, 0.5 + i
            rollout.group_mean, rollout.group_std = i / 7, i / 9
        buffer.insert(rollouts)
    del rollouts, rollout
    assert len(buffer) == num_rollouts
    per_rollout = (tracemalloc.get_traced_memory()[0] - before) / num_rollouts
    tracemalloc.stop()
    return per_rollout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--response-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    lengths = arguments.prompt_tokens, arguments.response_tokens

    arrays = to_arrays([row(*lengths)])
    stored = stored_nbytes(1, *lengths, with_old_log_probs=True)
    assert nbytes(arrays) == stored_nbytes(1, *lengths, with_old_log_probs=False)
    tensors = [value for value in to_rows(arrays)[0].values() if isinstance(value, torch.Tensor)]
    queued = sum(tensor.nbytes for tensor in tensors) + STAGE_BYTES * arguments.response_tokens
    driver = driver_bytes()
    print(f"a rollout of {lengths[0]:,} + {lengths[1]:,} tokens: store {stored:,} B, TransferQueue {queued:,} B,")
    print(f"driver with payload_store=sharded {driver:,.0f} B, with payload_store=driver {driver + stored:,.0f} B\n")
    print(f"{'stored rollouts':>16} {'driver, sharded':>16} {'store in all':>14}")
    for count in (10_000, 30_000, 100_000, 1_000_000):
        print(f"{count:>16,} {driver * count / 1e6:>13,.0f} MB {stored * count / 1e9:>11,.1f} GB")
    print(f"\n{'run':<34} {'rollouts a step':>16} {'into the store':>15} {'to train on':>12}")
    for name, pilots, commits, prompts, ratio in (
        ("GRPO with replay, 32 x 8", 0, 8, 32, 0.5),
        ("GRPO with replay, 512 x 16", 0, 16, 512, 0.5),
        ("Pilot-Commit, b_t 128, n 64", 16, 48, 128, 0.0),
        ("Pilot-Commit, b_t 128, n 128", 32, 96, 128, 0.0),
        ("Pilot-Commit, b_t 512, n 64", 16, 48, 512, 0.0),
    ):
        generated = 3 * prompts * pilots + prompts * commits
        trained = round(prompts * (pilots + commits) * (1 + ratio))
        columns = f"{generated:>16,} {generated * stored / 1e9:>12,.2f} GB {trained * queued / 1e9:>9,.2f} GB"
        print(f"{name:<34} {columns}")


if __name__ == "__main__":
    main()
