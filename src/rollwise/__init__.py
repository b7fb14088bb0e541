"""GRPO training that spends fewer rollouts."""
