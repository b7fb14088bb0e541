"""The loop without a trainer learns, and stores the log-probs of the policy that generated."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def bare_loop():
    spec = importlib.util.spec_from_file_location("bare_loop", EXAMPLES / "bare_loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_learns_and_counts_every_rollout(bare_loop, monkeypatch):
    torch.set_num_threads(1)
    entries, told = [], 0
    update, rollouts = bare_loop.Policy.update, bare_loop.Policy.rollouts

    def watched_update(self, batch):
        entries.append(update(self, batch))
        return entries[-1]

    def watched_rollouts(self, requests, problems):
        nonlocal told
        made = rollouts(self, requests, problems)
        told += len(made)
        return made

    monkeypatch.setattr(bare_loop.Policy, "update", watched_update)
    monkeypatch.setattr(bare_loop.Policy, "rollouts", watched_rollouts)
    before, after, totals = bare_loop.train(steps=12, seed=0, plain=False)
    assert after > before + 0.1
    assert totals["rollouts_generated"] == told
    assert totals["rows_replayed"] > 0
    ages, divergences = np.concatenate([e[:, [0, 5]] for e in entries]).T
    assert np.abs(divergences[ages == 0]).max() < 1e-4, "rows of this step's policy have ratio 1"
    assert divergences[ages >= 2].mean() > 1e-4, "older rows were made by another policy"
