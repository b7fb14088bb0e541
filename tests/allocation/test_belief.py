"""Belief allocation: what is believed, who is chosen, who goes on, and that nothing is forgotten."""

import math

import numpy as np
import pytest
from core_helpers import always, coin, count, play_step, prompts_of
from scipy import special, stats

from rollwise import Belief, ConfigError, RolloutScheduler
from rollwise.storage import load_state, save_state


def scheduler_of(num_prompts, *, seed=0, **options):
    defaults = {"train_prompts": 4, "first_rollouts": 4, "second_rollouts": 12, "cooldown_steps": 3}
    return RolloutScheduler(
        range(num_prompts), allocation=Belief(**(defaults | options)), seed=seed, patience_prompts=0
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_prompts": 0}, "train_prompts is 0"),
        ({"second_rollouts": 0}, "second_rollouts is 0"),
        ({"first_prompts": 0}, "first_prompts is 0"),
        ({"half_life_steps": 0.0}, "half_life_steps is 0.0"),
        ({"prior_strength": math.inf}, "prior_strength is inf"),
        ({"explore_share": 1.1}, "explore_share is 1.1"),
        ({"min_chance": -0.1}, "min_chance is -0.1"),
        ({"cooldown_steps": -1}, "cooldown_steps is -1"),
        ({"buckets": [0, -1]}, "buckets has 2 values, the smallest -1; give integers from 0 on"),
    ],
)
def test_settings_out_of_bounds_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Belief(**options)


def test_buckets_must_be_one_per_prompt():
    with pytest.raises(ConfigError, match="shape \\(3,\\) for 5 prompts"):
        scheduler_of(5, buckets=[0, 1, 0])


def test_the_expected_signal_is_that_of_the_beta_belief():
    """Against the integral of sqrt(p (1 - p)) over the density, for beliefs that the test makes up."""
    allocator = scheduler_of(3, prior_strength=2.0).allocator
    allocator._counts_P2[:] = [[0.0, 0.0], [3.0, 1.0], [0.0, 7.5]]
    allocator._bucket_counts_K2[:] = [[1e7, 3e7]]  # so much that the sample of its rate is its mean, 1/4
    actual = allocator.expected_signals(np.arange(3))
    for (s, f), value in zip([(0, 0), (3, 1), (0, 7.5)], actual, strict=True):
        belief = stats.beta(2 * 0.25 + s, 2 * 0.75 + f)
        expected = belief.expect(lambda p: math.sqrt(p * (1 - p)))
        assert value == pytest.approx(expected, rel=1e-3)


def test_a_bucket_rate_is_sampled_and_shared():
    one = scheduler_of(400, buckets=[0] * 200 + [1] * 200)
    allocator = one.allocator
    allocator._bucket_counts_K2[:] = [[6.0, 2.0], [0.0, 50.0]]
    a, b = allocator._beliefs(np.arange(400), np.random.default_rng(0))
    rates = a / (a + b)
    expected = stats.beta(6.5, 2.5)
    assert stats.kstest(rates[:200], expected.cdf).pvalue > 1e-3
    assert rates[200:].mean() < 0.03


@pytest.mark.parametrize(("seen", "succeeded"), [((0, 4), False), ((4, 0), True), ((1, 9), False)])
def test_the_chance_of_a_second_outcome_is_that_of_the_beta_binomial(seen, succeeded):
    allocator = scheduler_of(2, prior_strength=1.5).allocator
    allocator._counts_P2[1] = seen
    allocator._bucket_counts_K2[:] = [[30.0, 50.0]]
    rate = 30.5 / 81
    a, b = 1.5 * rate + seen[0], 1.5 * (1 - rate) + seen[1]
    none = (
        special.beta(a, b + 12) / special.beta(a, b) if not succeeded else special.beta(a + 12, b) / special.beta(a, b)
    )
    assert allocator._chances_of_the_other([1], [succeeded])[0] == pytest.approx(1 - none, rel=1e-9)


def test_a_step_is_two_waves_and_trains_on_both_as_one_group():
    one = scheduler_of(30, min_chance=0.0)
    asks, batch = play_step(one, coin(0.5))
    assert [count(ask) for ask in asks] == [6 * 4, 6 * 12]
    assert prompts_of(asks[0], "pilot") == prompts_of(asks[1], "commit")
    for prompt in prompts_of(asks[0], "pilot"):
        rows = [row for row in batch.rows if row.rollout.prompt_id == prompt]
        assert len(rows) == 16
        assert len({row.rollout.group_mean for row in rows}) == 1


def test_groups_of_one_outcome_stop_early_and_are_counted():
    one = scheduler_of(100, min_chance=1.0, explore_share=0.0)
    asks, batch = play_step(one, lambda request, i, step: float(request.prompt_id % 2))
    assert len(asks) == 1
    assert batch.rows == ()
    outcomes = one.ledger.by_outcome()
    assert outcomes["too_easy"] + outcomes["too_hard"] == 24
    assert outcomes["too_easy"] == 4 * sum(p % 2 for p in prompts_of(asks[0], "pilot"))


def test_unscored_first_waves_stop_and_are_counted_as_such():
    one = scheduler_of(100, explore_share=0.0)
    asks, batch = play_step(one, always(float("nan")))
    assert len(asks) == 1
    assert batch.rows == ()
    assert one.ledger.by_outcome()["unscored"] == 24


def test_prompts_of_the_even_share_get_both_waves():
    one = scheduler_of(100, min_chance=1.0, explore_share=0.5)
    asks, _ = play_step(one, always(0))
    assert [count(ask) for ask in asks] == [24, 36]
    assert one.ledger.by_outcome()["zero_variance"] == 3 * 16


def test_what_teaches_is_found_and_asked_for():
    """Three buckets: hopeless, teaching, solved. After some steps most rollouts go to the second."""
    rates = {p: [0.0, 0.5, 1.0][p % 3] for p in range(600)}
    one = scheduler_of(600, buckets=[p % 3 for p in range(600)], explore_share=0.25)
    generated, useful, chosen = 0, 0, np.zeros(3)
    for step in range(40):
        asks, batch = play_step(one, coin(rates))
        if step >= 10:
            generated += sum(count(ask) for ask in asks)
            useful += len(batch.rows)
            chosen += np.bincount([p % 3 for p in prompts_of(asks[0], "pilot")], minlength=3)
    assert useful / generated > 0.75  # uniform allocation: a third
    assert chosen[1] / chosen.sum() > 0.7


def test_every_bucket_stays_alive():
    """The weak spot of going where the signal is: here the even share keeps all buckets sampled, with both waves."""
    buckets = [p % 5 for p in range(500)]
    rates = {p: [0.0, 0.02, 0.5, 0.9, 1.0][p % 5] for p in range(500)}
    one = scheduler_of(500, buckets=buckets, first_prompts=25, explore_share=0.2)
    committed = np.zeros(5)
    for _ in range(60):
        asks, _ = play_step(one, coin(rates))
        committed += np.bincount([p % 5 for p in prompts_of(asks[1], "commit")], minlength=5)
    assert committed.min() >= 60  # one of each bucket a step: 5 of 25 over 5 buckets
    assert committed[2] > 3 * committed[0]


def test_a_bucket_that_begins_to_teach_is_noticed():
    rates = {p: [0.5, 0.0][p % 2] for p in range(400)}
    one = scheduler_of(400, buckets=[p % 2 for p in range(400)], half_life_steps=10, explore_share=0.2)
    share = []
    for step in range(80):
        play = coin(rates if step < 30 else {p: [1.0, 0.5][p % 2] for p in range(400)})
        asks, _ = play_step(one, play)
        pilots = prompts_of(asks[0], "pilot")
        share.append(np.mean([p % 2 for p in pilots]))
    assert np.mean(share[10:30]) < 0.4
    assert np.mean(share[60:]) > 0.7


def test_prompts_rest_and_a_small_pool_does_not():
    one = scheduler_of(60, cooldown_steps=4)
    last = {}
    for step in range(20):
        asks, _ = play_step(one, coin(0.5))
        for prompt in prompts_of(asks[0], "pilot"):
            assert step - last.get(prompt, -99) >= 4
            last[prompt] = step
    small = scheduler_of(3, cooldown_steps=4)
    for _ in range(5):
        asks, _ = play_step(small, coin(0.5))
        assert sorted(prompts_of(asks[0], "pilot")) == [0, 1, 2]


def test_a_prompt_has_rested_after_just_so_many_steps():
    one = scheduler_of(9, first_prompts=3, cooldown_steps=3)
    drawn = [set(prompts_of(play_step(one, coin(0.5))[0][0], "pilot")) for _ in range(12)]
    assert set.union(*drawn[:3]) == set(range(9))
    assert drawn[3:] == drawn[:-3]  # all others still rest


def test_what_was_seen_is_forgotten_by_half_after_the_half_life():
    one = scheduler_of(6, half_life_steps=5.0, first_rollouts=4, explore_share=0.0, min_chance=1.0)
    play_step(one, always(1), step=0)
    assert one.allocator._counts_P2.tolist() == [[4.0, 0.0]] * 6
    one.ask(10)
    assert one.allocator._counts_P2 == pytest.approx(np.array([[1.0, 0.0]] * 6))
    assert one.allocator._bucket_counts_K2 == pytest.approx(np.array([[6.0, 0.0]]))


def test_a_resumed_run_asks_for_the_same(tmp_path):
    def play(one, steps):
        reward = coin({p: p / 200 for p in range(200)})
        return [
            [(r.prompt_id, r.purpose) for ask in play_step(one, reward, payload=True)[0] for r in ask]
            for _ in range(steps)
        ]

    buckets = [p // 40 for p in range(200)]
    expected = play(scheduler_of(200, buckets=buckets), 20)
    stopped = scheduler_of(200, buckets=buckets)
    play(stopped, 9)
    save_state(tmp_path, stopped.state_dict())
    resumed = scheduler_of(200, buckets=buckets)
    resumed.load_state_dict(load_state(tmp_path))
    assert play(resumed, 11) == expected[9:]
    other = scheduler_of(200, buckets=[0] * 200)
    other.load_state_dict(load_state(tmp_path))
    assert other.allocator._bucket_counts_K2.sum() == pytest.approx(stopped.allocator._counts_P2.sum())


def test_figures_for_the_log():
    one = scheduler_of(50, buckets=[p % 2 for p in range(50)])
    for _ in range(10):
        play_step(one, lambda request, i, step: float(request.prompt_id % 2))
    metrics = one.metrics()
    assert 0 < metrics["bucket_rate_min"] < 0.05 < 0.9 < metrics["bucket_rate_max"] < 1
    assert metrics["prompts_seen"] == len({p for p in range(50) if one.allocator._last_step_P[p] >= 0})
