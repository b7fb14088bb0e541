"""Staleness by age, as the trainer logs it."""

import logging

import pytest
import tiny

ALL = {"allocation": "pilot_commit", "pilot_rollouts": 3, "p_lower": 0.1, "replay_ratio": 1.0}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fresh_rows_are_on_policy_and_replayed_ones_drift(tmp_path, accumulation):
    trainer = tiny.trainer(tmp_path, max_steps=8, learning_rate=3e-3, gradient_accumulation_steps=accumulation, **ALL)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry in logs:
        if "rollwise/kl/age_0" in entry:
            assert entry["rollwise/kl/age_0"] < 1e-9
            assert entry["rollwise/ess_token/age_0"] == pytest.approx(1.0, abs=1e-6)
            assert entry["rollwise/clip_fraction/age_0"] == 0.0
    last = logs[-1]
    assert last["rollwise/kl/age_4-7"] > last["rollwise/kl/age_1"] > 0
    assert last["rollwise/ess_token/age_4-7"] < 1.0
    assert (
        last["rollwise/ratio_q05/age_4-7"] <= last["rollwise/ratio_q50/age_4-7"] <= last["rollwise/ratio_q95/age_4-7"]
    )
    clipped = [value for entry in logs for name, value in entry.items() if "rollwise/clip_fraction" in name]
    assert max(clipped) > 0


def test_what_was_replayed_is_logged(tmp_path):
    trainer = tiny.trainer(tmp_path, max_steps=6, **ALL)
    batches, batch = [], trainer.scheduler.batch
    trainer.scheduler.batch = lambda: batches.append(batch()) or batches[-1]
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry, one in zip(logs, batches, strict=True):
        replayed = [row for row in one.rows if row.source == "replay"]
        if replayed:
            positive = sum(row.rollout.reward > row.rollout.group_mean for row in replayed) / len(replayed)
            assert entry["rollwise/replayed_positive_share"] == pytest.approx(positive)
            assert entry["rollwise/replayed_uses_mean"] >= 2  # as a fresh row, and now
            assert entry["rollwise/age_max"] == max(row.age_steps for row in replayed)
    assert "rollwise/replayed_uses_mean" in logs[-1]


def test_it_warns_once_when_replayed_rows_no_longer_count(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="rollwise"):
        tiny.trainer(tmp_path, max_steps=8, learning_rate=3e-2, replay_ess_bound=0.99, **ALL).train()
    assert caplog.text.count("effective sample size") == 1
    assert "lower the age bound" in caplog.text


def test_the_stock_run_has_no_staleness_figures(tmp_path):
    trainer = tiny.trainer(tmp_path)
    trainer.train()
    assert not any("age_0" in name for entry in trainer.state.log_history for name in entry)
