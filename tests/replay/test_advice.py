"""Warnings that name what to change."""

import re

import pytest

from rollwise import Replay, Rollout
from rollwise.replay import ReplayBuffer
from rollwise.replay.advice import idle_decay_advice, starvation_advice


@pytest.mark.parametrize(
    ("settings", "max_steps", "message"),
    [
        ({"decay_tau_steps": 500.0, "max_age_steps": 10}, 1000, "older than 10 steps: the oldest keeps 99%.*about 5,"),
        ({"decay_tau_steps": 500.0, "max_age_steps": None}, 40, "older than 40 steps: the oldest keeps 96%"),
        ({"decay_tau_versions": 900.0, "max_age_versions": 4}, 400, "decay_tau_versions is 900.*older than 4 versions"),
        ({"decay_tau_steps": 500.0, "max_age_steps": None}, 500, None),
        ({"decay_tau_steps": 10.0}, 100, None),
        ({"decay_tau_steps": 50.0, "alpha": 0.1}, 100, "keeps 98%"),
        ({"decay_tau_steps": "auto"}, 100, None),
        ({}, 100, None),
    ],
)
def test_decay_that_cannot_have_an_effect(settings, max_steps, message):
    advice = idle_decay_advice(Replay(**settings), max_steps)
    if message is None:
        assert advice is None
    else:
        assert re.search(message, advice)


def buffer_of(rewards, **settings):
    buffer = ReplayBuffer(Replay(**settings))
    rollouts = [Rollout(i, float(reward)) for i, reward in enumerate(rewards)]
    for rollout in rollouts:
        rollout.advantage, rollout.birth_step = rollout.reward - 0.5, 0
    buffer.insert(rollouts)
    return buffer


@pytest.mark.parametrize("priority", ["abs_reward", "reward", "positive_advantage"])
def test_starved_zero_rewards_are_told(priority):
    buffer = buffer_of([0] * 70 + [1] * 30, priority=priority, alpha=0.6)
    held, drawn = buffer.starved_share()
    assert held == 0.7
    own = 1.0 if priority != "positive_advantage" else 0.5
    assert drawn == pytest.approx(70 * 1e-6**0.6 / (70 * 1e-6**0.6 + 30 * (own + 1e-6) ** 0.6))
    assert f"70% of what is stored has priority 0 under '{priority}'" in starvation_advice(buffer)


@pytest.mark.parametrize(
    ("rewards", "settings"),
    [
        ([0] * 70 + [1] * 30, {}),  # by |advantage| nothing is 0
        ([0] * 70 + [1] * 30, {"priority": "abs_reward", "epsilon": 0.1}),
        ([0] * 70 + [1] * 30, {"priority": "abs_reward", "alpha": 0.0}),
        ([0] * 5 + [1] * 95, {"priority": "abs_reward"}),  # hardly any
        ([0] * 70 + [1] * 30, {"priority": "abs_reward", "epsilon": 0.002}),  # at least a tenth of their share
        ([0] * 10, {"priority": "abs_reward"}),  # nothing else to draw
        ([], {"priority": "abs_reward"}),
    ],
)
def test_no_warning_where_nothing_is_starved(rewards, settings):
    assert starvation_advice(buffer_of(rewards, **settings)) is None
