"""Ages on three clocks, and tau as it is measured."""

import json
import math

import numpy as np
import pytest
from core_helpers import coin, play_step
from hypothesis import given
from hypothesis import strategies as st

from rollwise import ProtocolError, Replay, Rollout, RolloutError, RolloutScheduler, Uniform
from rollwise.diagnostics import as_entries, row_entries
from rollwise.replay import Clock, ReplayBuffer
from rollwise.replay.freshness import AutoTau, KLClock
from rollwise.storage import load_state, save_state


def entries(*rows):
    """Rows given as (age, tokens, log ratio of each token)."""
    width = max(tokens for _, tokens, _ in rows)
    mask = np.array([[t < tokens for t in range(width)] for _, tokens, _ in rows])
    ratios = np.array([np.resize(ratio, width) for _, _, ratio in rows], dtype=float)
    return row_entries([age for age, _, _ in rows], ratios, mask, np.zeros_like(mask))


def with_kl(age, kl, tokens=10):
    """One row whose divergence estimate is `kl` per token."""
    row = np.zeros((1, 7))
    row[0, [0, 1, 3, 4, 5]] = age, tokens, tokens, tokens, kl * tokens
    return row


# --- the clock of cumulative KL -------------------------------------------------------------------------------------


def test_a_constant_drift_is_read_exactly():
    clock = KLClock()
    for step in range(30):
        rows = [with_kl(age, 0.02 * age) for age in range(1, min(step, 5) + 1)]
        clock.observe(step, np.concatenate(rows) if rows else as_entries(()))
        assert clock.reading == pytest.approx(0.02 * step, abs=1e-12)


def test_readings_weigh_rows_by_their_tokens():
    clock = KLClock()
    clock.observe(0, as_entries(()))
    clock.observe(1, np.concatenate([with_kl(1, 0.1, tokens=30), with_kl(1, 0.4, tokens=10)]))
    assert clock.reading == pytest.approx((30 * 0.1 + 10 * 0.4) / 40)


def test_the_clock_never_runs_backwards_and_stands_still_without_old_rows():
    clock = KLClock()
    for step, rows in enumerate([with_kl(0, 0.5), with_kl(1, 0.3), with_kl(1, -0.2), with_kl(0, 0.9), with_kl(3, 0.4)]):
        clock.observe(step, rows)
        assert clock.reading == [0.0, 0.3, 0.3, 0.3, 0.7][step]


def test_fresh_rows_take_no_part_in_a_steps_second_call_either():
    clock = KLClock()
    clock.observe(0, as_entries(()))
    clock.observe(1, with_kl(1, 0.3))
    clock.observe(1, with_kl(0, 0.5))  # after several updates on one batch
    assert clock.reading == 0.3


def test_rows_born_before_what_is_remembered_take_no_part():
    clock = KLClock()
    clock.observe(5000, with_kl(4999, 1.0))
    assert clock.reading == 0.0


def test_the_clocks_memory_is_bounded():
    clock = KLClock()
    for step in range(5000):
        clock.observe(step, as_entries(()))
    assert len(clock.state_dict()["by_step"]) == 4096
    clock.observe(5000, with_kl(4000, 1.0))
    assert clock.reading == 1.0


# --- tau ------------------------------------------------------------------------------------------------------------


def test_tau_is_that_of_the_measured_fall():
    """Rows with log ratios of +-s on half of their tokens each have ESS = 1 / cosh(s)^2 / ... in closed form."""
    tau = 12.0
    auto = AutoTau()
    rows = []
    for age in (1, 2, 5):
        # two equally frequent ratios a and b: ESS = (a + b)^2 / (2 (a^2 + b^2)); solve for b with a = 1
        ess = math.exp(-age / tau)
        b = (1 - math.sqrt(1 - (2 * ess - 1) ** 2)) / (2 * ess - 1)
        rows.append((age, 20, [0.0, math.log(b)]))
    assert auto.observe(entries(*rows))
    assert auto.tau_steps == pytest.approx(tau, rel=1e-9)


def test_tau_stays_while_nothing_goes_stale_and_ignores_fresh_rows():
    auto = AutoTau()
    assert not auto.observe(as_entries(()))
    assert not auto.observe(entries((0, 5, [0.0, 1.0]), (2, 5, [0.0])))
    assert auto.tau_steps is None


def test_small_changes_of_tau_leave_it_in_force_and_large_ones_follow():
    auto = AutoTau()
    auto.observe(entries((4, 20, [0.0, 0.5])))
    first = auto.tau_steps
    assert not auto.observe(entries((4, 20, [0.0, 0.51])))
    assert auto.tau_steps == first
    for _ in range(100):
        auto.observe(entries((4, 20, [0.0, 1.5])))
    fast = AutoTau()
    fast.observe(entries((4, 20, [0.0, 1.5])))
    assert auto.tau_steps == pytest.approx(fast.tau_steps, rel=0.11)
    assert auto.tau_steps < 0.3 * first


def test_tau_is_taken_over_from_a_tenth_more_or_less_on():
    def changes(factor):
        auto = AutoTau()
        auto.observe(entries((4, 20, [0.0, 0.5])))
        auto._weight *= factor  # tau is the weight over the fall
        return auto.observe(entries((1, 1, [0.0])))

    assert [changes(factor) for factor in (0.88, 0.95, 1.05, 1.15)] == [True, False, False, True]


def test_what_was_measured_counts_half_after_the_half_life():
    auto = AutoTau()
    auto.observe(entries((4, 20, [0.0, 0.5])))
    assert auto.state_dict()["weight"] == 20 * 4**2
    for _ in range(20):
        auto.observe(entries((1, 2, [0.0, 0.5])))
    later = 2 * sum(0.5 ** (i / 20) for i in range(20))
    assert auto.state_dict()["weight"] == pytest.approx(20 * 4**2 / 2 + later)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 30), st.floats(-20, 20)), min_size=1, max_size=8))
def test_tau_is_positive_whatever_is_measured(rows):
    auto = AutoTau()
    auto.observe(entries(*[(age, tokens, [0.0, ratio]) for age, tokens, ratio in rows]))
    assert auto.tau_steps is None or (auto.tau_steps > 0 and math.isfinite(auto.tau_steps))


# --- the buffer -----------------------------------------------------------------------------------------------------


def born(step, version, kl, advantage=1.0):
    rollout = Rollout(step, 1.0)
    rollout.birth_step, rollout.birth_version, rollout.birth_kl, rollout.advantage = step, version, kl, advantage
    return rollout


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("bounds", "oldest"),
    [
        ({"max_age_steps": 4}, 6),
        ({"max_age_versions": 2}, 6),
        ({"max_age_kl": 0.31}, 7),
        ({"max_age_steps": 5, "max_age_kl": 0.21}, 8),
        ({"max_age_versions": 1, "max_age_kl": 0.55}, 8),
    ],
)
def test_every_bound_holds_at_the_draw(bounds, oldest):
    """At step 10, version 5 and KL 1.0; births at every step, a version every second step, KL 0.1 a step."""
    buffer = ReplayBuffer(Replay(**({"max_age_steps": None} | bounds)))
    for step in range(10):
        buffer.insert([born(step, step // 2, 0.1 * step)])
    drawn = buffer.draw(100, Clock(10, 5, 1.0), rng())
    assert min(rollout.birth_step for rollout in drawn) == oldest
    assert len(drawn) == len(buffer) == 10 - oldest


@pytest.mark.parametrize("unit", ["rollout", "group"])
def test_decays_on_all_clocks_multiply(unit):
    settings = Replay(
        alpha=0.6,
        unit=unit,
        max_age_steps=None,
        decay_tau_steps=3.0,
        decay_tau_versions=2.0,
        decay_tau_kl=0.7,
        capacity_rollouts=100,
    )
    rollouts = [born(s, s // 2, 0.05 * s * s, advantage=0.5 + s % 3) for s in range(8)]
    buffer = ReplayBuffer(settings)
    buffer.insert(rollouts)
    now = Clock(8, 4, 0.05 * 64)
    weights = [
        (
            (abs(r.advantage) + 1e-6)
            * math.exp(-(now.step - r.birth_step) / 3.0)
            * math.exp(-(now.version - r.birth_version) / 2.0)
            * math.exp(-(now.kl - r.birth_kl) / 0.7)
        )
        ** 0.6
        for r in rollouts
    ]
    expected = np.array(weights) / sum(weights)
    keys = buffer._index.log_keys(np.arange(8))
    actual = np.exp(keys - keys.max()) / np.exp(keys - keys.max()).sum()
    assert 0.5 * np.abs(actual - expected).sum() < 1e-12


def test_another_tau_gives_the_buffer_that_had_it_from_the_start():
    """Through holes, moved slots and a change: the same keys in the same order."""
    changed = ReplayBuffer(Replay(max_age_steps=40, decay_tau_steps="auto", decay_tau_kl=2.0))
    always = ReplayBuffer(Replay(max_age_steps=40, decay_tau_steps=7.0, decay_tau_kl=2.0))
    for step in range(120):
        for buffer in (changed, always):
            buffer.insert([born(step, step, 0.01 * step, advantage=1 + i) for i in range(40)])
            buffer.evict(step)
        if step == 60:
            changed.set_decay_tau_steps(3.0)
        if step == 90:
            changed.set_decay_tau_steps(7.0)
    assert changed.decay_tau_steps == 7.0
    for buffer in (changed, always):
        assert len(buffer) == 41 * 40
    first, second = (b._index.log_keys(b._held_slots()) for b in (changed, always))
    assert (first == second).all()


def test_importance_weights_are_those_of_per():
    settings = Replay(alpha=0.7, per_beta=0.4, per_beta_steps=10, max_age_steps=None)
    buffer = ReplayBuffer(settings)
    rollouts = [born(0, 0, 0.0, advantage=a) for a in (0.1, 0.5, 1.0, 2.0, 4.0)]
    buffer.insert(rollouts)
    priorities = {id(r): (abs(r.advantage) + 1e-6) ** 0.7 for r in rollouts}
    total = sum(priorities.values())
    for step, beta in ((0, 0.4), (5, 0.7), (10, 1.0), (99, 1.0)):
        drawn, weights = buffer.draw_weighted(3, step, rng(step))
        plain = [(5 * priorities[id(r)] / total) ** -beta for r in drawn]
        assert weights == pytest.approx([w / max(plain) for w in plain], rel=1e-12)
        assert settings.beta(step) == pytest.approx(beta)
    without = ReplayBuffer(Replay(max_age_steps=None))
    without.insert(rollouts)
    assert without.draw_weighted(3, 0, rng())[1] == [1.0] * 3


def test_a_groups_rows_share_its_weight():
    buffer = ReplayBuffer(Replay(unit="group", per_beta=1.0, max_age_steps=None))
    small, large = [born(0, 0, 0.0, advantage=0.1) for _ in range(2)], [born(1, 1, 0.0, advantage=2) for _ in range(3)]
    buffer.insert([*small, *large])
    drawn, weights = buffer.draw_weighted(2, 1, rng())
    by_id = {id(r): w for r, w in zip(drawn, weights, strict=True)}
    assert {by_id[id(r)] for r in small} == {1.0}
    assert len({by_id[id(r)] for r in large}) == 1
    assert by_id[id(large[0])] < 0.5


# --- the scheduler's side -------------------------------------------------------------------------------------------


def scheduler(**replay):
    return RolloutScheduler(
        range(60),
        allocation=Uniform(train_prompts=4, num_rollouts=4),
        replay=Replay(**({"warmup_steps": 0, "max_age_steps": None} | replay)),
        seed=3,
    )


def drift(batch, per_step=0.03):
    """What a trainer would measure whose policy moves as far in every step."""
    return np.concatenate([with_kl(row.age_steps, per_step * row.age_steps) for row in batch.rows])


def test_the_kl_bound_acts_through_the_scheduler():
    one = scheduler(ratio=1.0, max_age_kl=0.1)
    oldest = 0
    for _ in range(25):
        _, batch = play_step(one, coin(0.5))
        one.feedback(staleness=drift(batch))
        # step 0 and step 1 are born at the same reading: nothing has been measured yet
        oldest = max([oldest, *(row.age_steps for row in batch.rows if row.rollout.birth_step > 0)])
    assert oldest == 3  # 0.09; a fourth step would be 0.12
    assert one.metrics()["cumulative_kl"] == pytest.approx(0.03 * 24)


def test_policy_versions_count_batches_and_not_steps():
    one = scheduler(ratio=1.0, max_age_versions=2)
    ages = set()
    for t in range(20):
        _, batch = play_step(one, coin(0.5), step=5 * t)
        ages |= {row.age_steps for row in batch.rows}
    assert ages == {0, 5, 10}


def test_replay_only_steps_are_no_policy_versions():
    one = scheduler(ratio=1.0, updates_per_fresh=2)
    told = []
    for _ in range(9):
        play_step(one, coin(0.5), told=told)
    assert {(r.birth_step, r.birth_version) for r in told} == {(0, 0), (3, 1), (6, 2)}


def test_tau_auto_follows_the_feedback_and_is_reported():
    one = scheduler(ratio=1.0, decay_tau_steps="auto")
    assert "decay_tau_steps" not in one.metrics()
    for _ in range(6):
        _, batch = play_step(one, coin(0.5))
        old = [(row.age_steps, 6, [0.0, 0.4 * row.age_steps]) for row in batch.rows]
        one.feedback(staleness=entries(*old))
    assert 2 < one.metrics()["decay_tau_steps"] < 30
    assert one.metrics()["decay_tau_steps"] == one.buffer.decay_tau_steps


@pytest.mark.parametrize(
    "replay",
    [
        {"ratio": 1.0, "decay_tau_steps": "auto", "max_age_kl": 0.2},
        {"ratio": 0.5, "updates_per_fresh": 2, "decay_tau_kl": 0.1, "per_beta": 0.4},
        {"ratio": 1.0, "priority": "uniform", "newcomers": "max", "max_age_versions": 3},
    ],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, replay):
    def play(one, steps):
        keys = []
        for _ in range(steps):
            _, batch = play_step(one, coin(0.4), payload=True)
            stale = [(row.age_steps, 3, [0.0, 0.2 * row.age_steps]) for row in batch.rows]
            one.feedback(
                staleness=entries(*stale) if stale else None, priorities=[1.0 + r.age_steps for r in batch.rows]
            )
            keys.append([(r.rollout.prompt_id, r.source, r.age_steps, r.weight) for r in batch.rows])
        return keys

    expected = play(scheduler(**replay), 14)
    for stop in (5, 6, 7):  # between fresh and replay-only updates, too
        stopped = scheduler(**replay)
        play(stopped, stop)
        save_state(tmp_path / str(stop), stopped.state_dict())
        json.dumps({key: value for key, value in stopped.state_dict().items() if key != "rollouts"})
        resumed = scheduler(**replay)
        resumed.load_state_dict(load_state(tmp_path / str(stop)))
        assert play(resumed, 14 - stop) == expected[stop:]


def test_new_priorities_take_effect_at_the_next_draw():
    one = scheduler(ratio=1.0, alpha=1.0, epsilon=0.0, priority="uniform")
    _, batch = play_step(one, coin(0.5))
    chosen = batch.rows[2].rollout
    one.feedback(priorities=[float(row.rollout is chosen) for row in batch.rows])
    _, after = play_step(one, coin(0.5, seed=1))
    assert [row.rollout for row in after.rows if row.source == "replay"] == [chosen]
    # nothing was said about the second batch's fresh rows, and NaN leaves what was
    one.feedback(priorities=[math.nan] * len(after.rows))
    _, third = play_step(one, coin(0.5, seed=2))
    replayed = {id(row.rollout) for row in third.rows if row.source == "replay"}
    assert replayed <= {id(chosen), *(id(row.rollout) for row in after.rows)}
    assert len(replayed) > 1


def test_priorities_of_a_group_are_the_mean_over_its_rows():
    one = scheduler(ratio=1.0, unit="group")
    _, batch = play_step(one, coin(0.5))
    one.feedback(priorities=np.arange(len(batch.rows), dtype=float))
    by_prompt = {}
    for i, row in enumerate(batch.rows):
        by_prompt.setdefault(row.rollout.prompt_id, []).append(i)
    held = one.buffer._held_slots()
    values = dict(zip([u[0].prompt_id for u in one.buffer._units_N[held]], one.buffer._values_N[held], strict=True))
    assert values == pytest.approx({prompt: np.mean(rows) for prompt, rows in by_prompt.items()})


@pytest.mark.parametrize(
    ("priorities", "message"),
    [([1.0], "shape \\(1,\\) for .* rows; give one a row"), ("negative", "the priority of row 1 is -2.0; it must be")],
)
def test_wrong_feedback_is_refused_and_changes_nothing(priorities, message):
    one = scheduler(ratio=1.0)
    _, batch = play_step(one, coin(0.5))
    before = one.buffer._values_N.copy()
    if priorities == "negative":
        priorities = [1.0, -2.0] + [1.0] * (len(batch.rows) - 2)
    with pytest.raises(RolloutError, match=message):
        one.feedback(priorities=priorities)
    assert (one.buffer._values_N == before).all()


def test_feedback_has_its_place_between_batch_and_ask():
    one = scheduler(ratio=1.0)
    one.ask()
    with pytest.raises(ProtocolError, match="between batch\\(\\) and the next ask\\(\\)"):
        one.feedback(staleness=as_entries(()))
    without = RolloutScheduler(range(9), allocation=Uniform(train_prompts=2, num_rollouts=2))
    play_step(without, coin(0.5))
    without.feedback(staleness=with_kl(1, 0.5), priorities=[1.0])  # no replay: nothing to change
    assert "cumulative_kl" not in without.metrics()
