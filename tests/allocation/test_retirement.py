"""Prompts that leave the pool on evidence, and come back; pilots that leave their group."""

from itertools import combinations

import numpy as np
import pytest
from core_helpers import always, coin, count, pilot_commit, play_step, prompts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise import ConfigError, PilotCommit, RolloutScheduler
from rollwise.allocation.pilot_commit import max_variance_subset
from rollwise.storage import load_state, save_state


def scheduler_of(num_prompts, **options):
    defaults = {"solved_prompts": "retire", "pilot_prompts": 4, "pilot_rollouts": 8, "retire_rollouts": 16}
    return RolloutScheduler(
        range(num_prompts), allocation=pilot_commit(**(defaults | options)), seed=2, patience_prompts=0
    )


def test_a_prompt_retires_after_enough_successes_in_a_row_and_not_before():
    one = scheduler_of(4, max_pilot_rounds=1, recheck_share=0.0)
    play_step(one, always(1))
    assert one.pool.num_live == 4  # 8 in a row
    play_step(one, always(1))
    assert one.pool.num_live == 0  # 16
    assert "all 4 prompts have retired, after 16 successful rollouts in a row each" in one.stop_reason
    assert one.ledger.by_outcome()["solved"] == 64


def test_a_failure_starts_the_row_anew():
    one = scheduler_of(4, max_pilot_rounds=1, recheck_share=0.0, p_solve=0.8, p_upper=0.8)
    seven = lambda request, i, step: float(i > 0)  # noqa: E731
    for reward in (always(1), seven, always(1), seven, always(1)):
        play_step(one, reward)
        assert one.pool.num_live == 4
    play_step(one, always(1))
    assert one.pool.num_live == 0


def test_unscored_pilots_neither_count_nor_break_a_row():
    one = scheduler_of(4, max_pilot_rounds=1, recheck_share=0.0)
    half = lambda request, i, step: float("nan") if i % 2 else 1.0  # noqa: E731
    for expected in (4, 4, 4, 0):
        play_step(one, half)
        assert one.pool.num_live == expected


def test_retired_prompts_are_piloted_again_at_the_stated_rate_and_come_back():
    one = scheduler_of(40, max_pilot_rounds=1, recheck_share=0.25, pilot_prompts=10, retire_rollouts=8)
    rates = dict.fromkeys(range(40), 0.5) | dict.fromkeys(range(20), 1.0)
    play = coin(rates)
    for _ in range(12):
        play_step(one, play)
    assert one.pool.removed == list(range(20))
    rechecked = []
    for _ in range(200):
        asks, _ = play_step(one, play)
        rechecked.append(len(set(prompts_of(asks[0], "pilot")) & set(range(20))))
        assert count(asks[0], "pilot") <= 80  # they are part of the round, not more on top
    assert np.mean(rechecked) == pytest.approx(2.5, abs=0.15)
    assert one.pool.removed == list(range(20))
    forgotten = coin(rates | {3: 0.2})
    steps = 0
    while 3 in one.pool.removed:
        play_step(one, forgotten)
        steps += 1
        assert steps < 100
    assert one.pool.removed == [p for p in range(20) if p != 3]
    seen = set()
    for _ in range(20):
        asks, _ = play_step(one, forgotten)
        seen |= set(prompts_of(asks[0], "pilot"))
    assert 3 in seen


def test_the_plain_rule_never_looks_back():
    one = scheduler_of(12, solved_prompts="remove", max_pilot_rounds=1)
    play = coin(dict.fromkeys(range(12), 0.5) | {0: 1.0, 1: 1.0})
    for _ in range(60):
        asks, _ = play_step(one, play)
    assert {0, 1} <= set(one.pool.removed)
    for _ in range(60):
        asks, _ = play_step(one, coin(0.5))
        assert not {0, 1} & set(prompts_of(asks[0], "pilot"))


def test_retirement_is_in_the_checkpoint(tmp_path):
    def play(one, steps):
        reward = coin(dict.fromkeys(range(30), 0.9))
        return [
            [(r.prompt_id, r.purpose) for ask in play_step(one, reward, payload=True)[0] for r in ask]
            for _ in range(steps)
        ]

    options = {"recheck_share": 0.3, "retire_rollouts": 8, "downsample_pilots": 4}
    expected = play(scheduler_of(30, **options), 30)
    stopped = scheduler_of(30, **options)
    play(stopped, 15)
    assert stopped.pool.removed
    save_state(tmp_path, stopped.state_dict())
    resumed = scheduler_of(30, **options)
    resumed.load_state_dict(load_state(tmp_path))
    assert play(resumed, 15) == expected[15:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retire_rollouts": 0}, "retire_rollouts is 0"),
        ({"recheck_share": 1.5}, "recheck_share is 1.5"),
        ({"downsample_pilots": 17}, "downsample_pilots is 17; it must be between 1 and pilot_rollouts 16"),
        ({"downsample_pilots": 0}, "downsample_pilots is 0"),
    ],
)
def test_settings_out_of_bounds_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PilotCommit(**options)


# --- downsampling -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.floats(-50, 50), st.sampled_from([0.0, 1.0])), min_size=1, max_size=9),
    st.data(),
)
def test_the_subset_has_the_largest_variance_of_all(rewards, data):
    num_kept = data.draw(st.integers(1, len(rewards)))
    chosen = max_variance_subset(rewards, num_kept)
    assert len(set(chosen)) == num_kept
    best = max(np.var([rewards[i] for i in subset]) for subset in combinations(range(len(rewards)), num_kept))
    assert np.var([rewards[i] for i in chosen]) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_survivors_keep_the_pilots_that_vary_most_and_the_ledger_counts_the_rest():
    one = scheduler_of(8, downsample_pilots=4, max_pilot_rounds=1)
    reward = lambda request, i, step: float(i < 2) if request.purpose == "pilot" else 0.0  # noqa: E731
    _, batch = play_step(one, reward)
    by_prompt = {}
    for row in batch.rows:
        by_prompt.setdefault(row.rollout.prompt_id, []).append(row)
    assert len(by_prompt) == 2
    for rows in by_prompt.values():
        pilots = [row.rollout.reward for row in rows if row.source == "pilot"]
        assert sorted(pilots) == [0.0, 0.0, 1.0, 1.0]
        assert len(rows) == 4 + 4
        mean = 2 / 8  # of the joint group as it is trained on
        assert {row.rollout.group_mean for row in rows} == {mean}
    outcomes = one.ledger.by_outcome()
    assert outcomes["downsampled"] == 4 * 4  # of four survivors, the two that wait included
    assert sum(outcomes.values()) == 4 * 8 + 2 * 4


def test_unscored_pilots_stay_in_a_downsampled_group_until_the_ledger_counts_them():
    one = scheduler_of(8, downsample_pilots=4, max_pilot_rounds=1, max_survivor_age_steps=1)
    play_step(one, lambda request, i, step: float("nan") if i == 7 else float(i < 2))
    for _ in range(3):  # the surplus survivors are used or age out
        play_step(one, always(0))
    outcomes = one.ledger.by_outcome()
    assert outcomes["unscored"] == 4
    assert outcomes["downsampled"] == 4 * 3
    assert outcomes["pending"] == 0


def test_graded_rewards_keep_their_extremes():
    assert max_variance_subset([0.1, 0.9, 0.5, 0.0, 1.0, 0.4], 2) == [3, 4]
    assert max_variance_subset([0.1, 0.9, 0.5, 0.0, 1.0, 0.4], 4) == [0, 1, 3, 4]
    assert max_variance_subset([1.0, 1.0, 1.0, 0.0], 2) in ([0, 3], [1, 3], [2, 3])
