"""Dynamic sampling, round by round: what is dropped, what is surplus, and where the rounds end."""

import math

import pytest
from core_helpers import always, answer, coin, count, first, play_step, row_key

from rollwise import ConfigError, DynamicSampling, RolloutScheduler
from rollwise.storage import load_state, save_state


def scheduler_of(num_prompts, *, seed=0, patience_prompts=1000, **options):
    settings = {"train_prompts": 2, "num_rollouts": 4} | options
    allocation = DynamicSampling(**settings)
    return RolloutScheduler(range(num_prompts), allocation=allocation, seed=seed, patience_prompts=patience_prompts)


def by_turn(*successes):
    """The n-th prompt that is asked for has `successes[n]`."""
    turns = {}

    def reward_of(request, i, step):
        return float(i < successes[turns.setdefault((step, request.prompt_id), len(turns))])

    return reward_of


def outcomes(scheduler):
    return {name: number for name, number in scheduler.ledger.by_outcome().items() if number}


def prompts_in(asks):
    return [[request.prompt_id for request in ask] for ask in asks]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_prompts": 0}, "train_prompts is 0"),
        ({"max_rounds": 0}, "max_rounds is 0"),
        ({"num_rollouts": 1}, "num_rollouts is 1; .* at least 2"),
        ({"round_prompts": 0}, "round_prompts is 0; .* or None"),
        ({"at_bound": "raise"}, "at_bound is 'raise'; .*'train', 'stop'"),
    ],
)
def test_settings_out_of_bounds_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        DynamicSampling(**options)


def test_it_chooses_its_prompts_itself():
    scheduler = scheduler_of(5)
    with pytest.raises(ConfigError, match="ask without `prompts`"):
        scheduler.ask(prompts=[1])
    assert scheduler.ask()  # the refused call left no trace


# --- the rounds -------------------------------------------------------------------------------------------------------


def test_rounds_until_the_batch_is_full_of_groups_that_vary():
    scheduler = scheduler_of(20)
    asks, batch = play_step(scheduler, by_turn(0, 4, 2, 0, 1, 3))
    assert [[r.purpose for r in ask] for ask in asks] == [["uniform"] * 2, ["resample"] * 2, ["resample"] * 2]
    assert [count(ask) for ask in asks] == [8, 8, 8]
    drawn = [prompt for ask in prompts_in(asks) for prompt in ask]
    assert len(set(drawn)) == 6
    assert [row.rollout.prompt_id for row in batch.rows] == [drawn[2]] * 4 + [drawn[4]] * 4
    assert outcomes(scheduler) == {"trained": 8, "zero_variance": 12, "surplus": 4}
    assert scheduler.ledger.by_purpose() == {"uniform": 8, "resample": 16}
    assert scheduler.metrics()["sampling_rounds"] == 3
    assert scheduler.metrics()["varying_share"] == 0.5
    assert {row.source for row in batch.rows} == {"resample"}
    asks, _ = play_step(scheduler, first(2))  # nothing of the step is left in the next
    assert [[r.purpose for r in ask] for ask in asks] == [["uniform"] * 2]
    assert outcomes(scheduler) == {"trained": 16, "zero_variance": 12, "surplus": 4}


@pytest.mark.parametrize(("round_prompts", "surplus"), [(None, 0), (1, 0), (3, 4), (5, 12)])
def test_a_round_has_its_own_number_of_prompts(round_prompts, surplus):
    scheduler = scheduler_of(20, round_prompts=round_prompts)
    asks, batch = play_step(scheduler, first(1))
    assert {len(ask) for ask in asks} == {round_prompts or 2}
    assert len(batch.rows) == 8
    assert scheduler.ledger.by_outcome()["surplus"] == surplus


@pytest.mark.parametrize(
    ("rewards", "is_trained"),
    [
        ([0.1, 0.1, 0.1, 0.1], False),  # np.std of three of these is not 0
        ([0.1, 0.1, 0.1, math.nan], False),
        ([math.nan, math.inf, -math.inf, 1.0], False),
        ([math.nan] * 4, False),
        ([None, None, 0.0, 1e-9], True),
    ],
)
def test_the_range_of_the_scored_rewards_decides(rewards, is_trained):
    scheduler = scheduler_of(1)
    _, batch = play_step(scheduler, lambda request, i, step: rewards[i])
    scored = sum(reward is not None and math.isfinite(reward) for reward in rewards)
    expected = {"trained" if is_trained else "zero_variance": scored, "unscored": 4 - scored}
    assert outcomes(scheduler) == {name: number for name, number in expected.items() if number}
    assert len(batch.rows) == (scored if is_trained else 0)
    assert scheduler.metrics()["varying_share"] == is_trained


def test_unscored_rollouts_of_surplus_groups_are_unscored():
    scheduler = scheduler_of(4, train_prompts=1, round_prompts=2)
    play_step(scheduler, lambda request, i, step: math.nan if i == 3 else float(i % 2))
    assert outcomes(scheduler) == {"trained": 3, "surplus": 3, "unscored": 2}


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_the_waste_is_that_of_groups_without_variance(rate):
    """Trial of trl 3708: p^G + (1 - p)^G of the groups are wasted. Four standard deviations of 1,600 groups."""
    scheduler = scheduler_of(2000, num_rollouts=8, max_rounds=100)
    while scheduler.ledger.totals()["rollouts_generated"] < 8 * 1600:
        play_step(scheduler, coin(rate), max_asks=100)
    generated = scheduler.ledger.totals()["rollouts_generated"]
    expected = rate**8 + (1 - rate) ** 8
    tolerance = 4 * math.sqrt(expected * (1 - expected) / 1600)
    assert scheduler.ledger.by_outcome()["zero_variance"] / generated == pytest.approx(expected, abs=tolerance)


# --- where the rounds end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [0.0, 1.0, math.nan])
@pytest.mark.parametrize("at_bound", ["train", "stop"])
def test_a_data_set_without_variance_ends_after_the_rounds(reward, at_bound):
    """Trials of verl 953 (the run dies at the limit) and 1108 (it never ends)."""
    scheduler = scheduler_of(1000, max_rounds=7, at_bound=at_bound, patience_prompts=30)
    asks, batch = play_step(scheduler, always(reward))
    assert [len(ask) for ask in asks] == [2] * 7
    assert batch.rows == ()
    assert outcomes(scheduler) == {"unscored" if math.isnan(reward) else "zero_variance": 7 * 2 * 4}
    if at_bound == "stop":
        assert "step 0 found 0 groups with reward variance where train_prompts is 2" in scheduler.stop_reason
        assert "in 7 rounds of 2 prompts (max_rounds is 7)" in scheduler.stop_reason
        assert "raise max_rounds or num_rollouts" in scheduler.stop_reason
    else:
        assert scheduler.stop_reason is None
        for _ in range(2):
            play_step(scheduler, always(reward))
        assert "patience_prompts is 30" in scheduler.stop_reason


def test_at_the_bound_it_trains_on_what_there_is():
    for at_bound in ("train", "stop"):
        scheduler = scheduler_of(100, train_prompts=3, max_rounds=2, at_bound=at_bound)
        _, batch = play_step(scheduler, by_turn(0, 1, 0, 4, 2, 0))
        assert len(batch.rows) == 8
        assert outcomes(scheduler) == {"trained": 8, "zero_variance": 16}
        assert (scheduler.stop_reason is not None) == (at_bound == "stop")
    assert "step 0 found 2 groups" in scheduler.stop_reason
    play_step(scheduler, first(2))  # whoever goes on all the same, and fills a batch, need not stop
    assert scheduler.stop_reason is None


def test_no_prompt_is_drawn_twice_in_a_step():
    scheduler = scheduler_of(7, round_prompts=3, at_bound="stop")
    for _ in range(5):
        asks, _ = play_step(scheduler, always(0))
        assert [len(ask) for ask in asks] == [3, 3, 1]
        assert sorted(prompt for ask in prompts_in(asks) for prompt in ask) == list(range(7))
        assert "in 3 rounds of 3 prompts (all 7 prompts have been drawn)" in scheduler.stop_reason


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_pool_smaller_than_a_batch_is_trained_on_as_it_is(num_prompts):
    scheduler = scheduler_of(num_prompts, train_prompts=5, at_bound="stop", max_rounds=1)
    for _ in range(3):
        asks, batch = play_step(scheduler, first(2))
        assert [sorted(ask) for ask in prompts_in(asks)] == [list(range(num_prompts))]
        assert len(batch.rows) == 4 * num_prompts
        assert scheduler.stop_reason is None
    play_step(scheduler, always(1))
    assert scheduler.stop_reason is None


# --- resume -----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_exactly(tmp_path):
    rates = {prompt: (0.0, 0.05, 0.5, 1.0)[prompt % 4] for prompt in range(30)}

    def play(scheduler, num_steps):
        steps = [play_step(scheduler, coin(rates)) for _ in range(num_steps)]
        return [(asks, [row_key(row) for row in batch.rows]) for asks, batch in steps]

    whole, stopped = (scheduler_of(30, max_rounds=3) for _ in range(2))
    steps = play(whole, 12)
    assert play(stopped, 5) == steps[:5]
    save_state(tmp_path, stopped.state_dict())
    again = scheduler_of(30, max_rounds=3)
    again.load_state_dict(load_state(tmp_path))
    assert again.metrics() == stopped.metrics()
    assert play(again, 7) == steps[5:]
    assert again.ledger.records() == whole.ledger.records()


def test_a_stop_holds_for_the_settings_it_was_met_with(tmp_path):
    stopped = scheduler_of(100, max_rounds=2, at_bound="stop")
    play_step(stopped, always(0))
    save_state(tmp_path, stopped.state_dict())
    for options, stops in (({"max_rounds": 2}, True), ({"max_rounds": 20}, False)):
        again = scheduler_of(100, at_bound="stop", **options)
        again.load_state_dict(load_state(tmp_path))
        assert again.stop_reason == (stopped.stop_reason if stops else None)


def test_a_step_that_was_open_is_forgotten():
    scheduler = scheduler_of(30)
    state = scheduler.state_dict()
    scheduler.tell(answer(scheduler.ask(), by_turn(2, 0), 0))
    scheduler.ask()
    scheduler.load_state_dict(state)
    asks, batch = play_step(scheduler, first(1))
    assert [[r.purpose for r in ask] for ask in asks] == [["uniform"] * 2]
    assert len(batch.rows) == 8
