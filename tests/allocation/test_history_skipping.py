"""History skipping: who is skipped and how often, what a visit changes, and that a step always has requests."""

import math

import pytest
from core_helpers import always, answer, coin, first, play_step, row_key

from rollwise import ConfigError, HistorySkipping, RolloutScheduler
from rollwise.storage import load_state, save_state


def scheduler_of(num_prompts, *, seed=0, **options):
    settings = {"train_prompts": 2, "num_rollouts": 4} | options
    return RolloutScheduler(range(num_prompts), allocation=HistorySkipping(**settings), seed=seed)


def play(scheduler, reward_of):
    """A step; the prompts it asked for."""
    asks, _ = play_step(scheduler, reward_of)
    assert len(asks) == 1  # never a second round
    return [request.prompt_id for request in asks[0]]


def spy_on_draws(scheduler):
    """Every prompt that the pool hands out from now on."""
    drawn, draw = [], scheduler.pool.draw

    def spy(*arguments):
        prompts = draw(*arguments)
        drawn.extend(prompts)
        return prompts

    scheduler.pool.draw = spy
    return drawn


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_prompts": 0}, "train_prompts is 0"),
        ({"max_skips_factor": 0}, "max_skips_factor is 0"),
        ({"num_rollouts": 1}, "num_rollouts is 1; .* at least 2"),
        ({"explore_easy": -0.1}, "explore_easy is -0.1; .* between 0 and 1"),
        ({"explore_hard": 1.1}, "explore_hard is 1.1; .* between 0 and 1"),
        ({"explore_hard": math.nan}, "explore_hard is nan"),
        ({"target_zero_variance": 1.5}, "target_zero_variance is 1.5; .* or None"),
    ],
)
def test_settings_out_of_bounds_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        HistorySkipping(**options)


def test_it_chooses_its_prompts_itself():
    scheduler = scheduler_of(5)
    with pytest.raises(ConfigError, match="ask without `prompts`"):
        scheduler.ask(prompts=[1])
    assert scheduler.ask()  # the refused call left no trace


# --- the history ------------------------------------------------------------------------------------------------------

HARD, EASY, MIXED, UNSCORED, ALMOST = (
    [0, 0, 0, 0],
    [1, 1, 1, 1],
    [0, 1, 0, 0],
    [math.nan] * 4,
    [math.inf, 0, None, None],
)


@pytest.mark.parametrize(
    ("visits", "skips"),
    [
        ([HARD, HARD, HARD], [0.8, 0.96, 0.992]),  # 1 - 0.2^z
        ([EASY, EASY, EASY], [0.4, 0.64, 0.784]),  # 1 - 0.6^z
        ([HARD, HARD, MIXED, EASY], [0.8, 0.96, 0.0, 0.4]),
        ([HARD, EASY, HARD], [0.8, 0.64, 0.992]),  # z counts both kinds, the last one chooses p_explore
        ([UNSCORED, HARD, UNSCORED, ALMOST], [0.0, 0.8, 0.8, 0.8]),  # fewer than two scores say nothing
        ([[0.5] * 4, [1.5] * 4, [0.5, 0.5, 0.5, 0.6]], [0.8, 0.64, 0.0]),  # part marks without variance are no success
        ([[0.1, 0.1, 0.1, math.nan]], [0.8]),  # the range decides, not a float std
    ],
)
def test_skip_probability_after_visits(visits, skips):
    scheduler = scheduler_of(1, explore_hard=0.2, explore_easy=0.6)
    assert scheduler.allocator.skip_probability(0) == 0.0
    for rewards, skip in zip(visits, skips, strict=True):
        assert play(scheduler, lambda request, i, step, rewards=rewards: rewards[i]) == [0]
        assert scheduler.allocator.skip_probability(0) == pytest.approx(skip)


def test_success_is_what_the_threshold_says():
    scheduler = scheduler_of(1, explore_hard=0.2, explore_easy=0.6, success_threshold=0.5)
    play(scheduler, always(0.5))
    assert scheduler.allocator.skip_probability(0) == pytest.approx(0.4)


def test_it_trains_on_all_groups_as_plain_grpo_does():
    scheduler = scheduler_of(4, train_prompts=4)
    _, batch = play_step(scheduler, first({0: 0, 1: 4, 2: 1, 3: 2}))
    assert sorted({row.rollout.prompt_id for row in batch.rows}) == [2, 3]
    settled = {name: number for name, number in scheduler.ledger.by_outcome().items() if number}
    assert settled == {"trained": 8, "zero_variance": 8}
    assert scheduler.ledger.by_purpose() == {"uniform": 16}


# --- the skipping -----------------------------------------------------------------------------------------------------


def test_prompts_without_variance_are_skipped_for_those_with():
    """p_explore 0: after the first epoch only the prompts that vary are sampled."""
    scheduler = scheduler_of(8, explore_easy=0.0, explore_hard=0.0)
    rewards = first({p: (0, 4, 2, 0)[p % 4] for p in range(8)})
    epoch = [prompt for _ in range(4) for prompt in play(scheduler, rewards)]
    assert sorted(epoch) == list(range(8))
    for _ in range(6):
        assert sorted(play(scheduler, rewards)) == [2, 6]
    assert scheduler.metrics()["mean_zero_variance_visits"] == 6 / 8
    assert scheduler.metrics()["skipped_share"] > 0


def test_exploring_always_skips_nothing():
    scheduler = scheduler_of(6, explore_easy=1.0, explore_hard=1.0)
    for _ in range(4):
        assert sorted(prompt for _ in range(3) for prompt in play(scheduler, always(0))) == list(range(6))
        assert scheduler.metrics()["skipped_share"] == 0.0
    assert scheduler.metrics()["mean_zero_variance_visits"] == 4.0


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_when_all_are_skipped_the_first_ones_are_taken(reward):
    scheduler = scheduler_of(20, explore_easy=0.0, explore_hard=0.0, max_skips_factor=3)
    for _ in range(10):
        play(scheduler, always(reward))
    for _ in range(5):
        drawn = spy_on_draws(scheduler)
        asked = play(scheduler, always(reward))
        assert len(set(drawn)) == len(drawn) == 3 * 2
        assert asked == drawn[:2]
        assert scheduler.metrics()["skipped_share"] == 1.0


def test_a_batch_is_filled_up_with_the_first_that_were_skipped():
    scheduler = scheduler_of(12, train_prompts=3, explore_easy=0.0, explore_hard=0.0, max_skips_factor=2)
    rewards = first({p: 2 if p == 5 else 0 for p in range(12)})
    for _ in range(4):
        play(scheduler, rewards)
    for _ in range(8):
        drawn = spy_on_draws(scheduler)
        asked = play(scheduler, rewards)
        assert len(drawn) == 6
        skipped = [prompt for prompt in drawn if prompt != 5]
        assert asked == ([5, *skipped[:2]] if 5 in drawn else skipped[:3])


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("reward", [0.0, 1.0, math.nan])
def test_a_small_pool_without_variance_still_has_requests(num_prompts, reward):
    scheduler = scheduler_of(num_prompts, train_prompts=8, explore_easy=0.0, explore_hard=0.0)
    for _ in range(10):
        assert sorted(play(scheduler, always(reward))) == list(range(num_prompts))
    assert scheduler.stop_reason is None


@pytest.mark.parametrize(("reward", "explore"), [(0.0, 0.3), (1.0, 0.8)])
def test_prompts_are_skipped_as_often_as_the_formula_says(reward, explore):
    """Epoch z + 1, in which every prompt has had z visits: the share skipped is 1 - p^z, within four deviations."""
    scheduler = scheduler_of(2000, train_prompts=50, max_skips_factor=1000, explore_hard=0.3, explore_easy=0.8)
    for _ in range(40):
        play(scheduler, always(reward))
    scheduler.allocator._streaks_P[:] = 2
    looked_at = skipped = 0
    while looked_at < 1500:
        drawn = spy_on_draws(scheduler)
        skipped -= len(play(scheduler, always(reward)))
        looked_at += len(drawn)
        skipped += len(drawn)
    assert scheduler.pool.epoch == 2
    expected = 1 - explore**2
    assert skipped / looked_at == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 1500))


# --- the adjustment ---------------------------------------------------------------------------------------------------


def test_exploration_moves_towards_the_target_from_the_second_epoch_on():
    """Target 0.3: 0.1 easy, 0.2 hard. Of the four prompts of a step, 1 (0.25) is easy and none is hard."""
    scheduler = scheduler_of(4, train_prompts=4, target_zero_variance=0.3)
    rewards = first({0: 4, 1: 1, 2: 2, 3: 3})
    explores = []
    for _ in range(3):
        play(scheduler, rewards)
        explores.append([round(scheduler.metrics()[f"explore_{kind}"], 9) for kind in ("easy", "hard")])
    assert explores == [[0.5, 0.5], [0.49, 0.51], [0.48, 0.52]]


@pytest.mark.parametrize(("reward", "ends"), [(0.0, (0.95, 0.05)), (1.0, (0.05, 0.95)), (math.nan, (0.5, 0.5))])
def test_exploration_stays_within_its_bounds(reward, ends):
    scheduler = scheduler_of(3, target_zero_variance=0.25)
    for _ in range(60):
        play(scheduler, always(reward))
    assert (scheduler.metrics()["explore_easy"], scheduler.metrics()["explore_hard"]) == pytest.approx(ends)


def test_a_share_just_at_the_target_is_met():
    """Code and paper lower p_explore from the target on: 2 of 4 are hard, and two thirds of 0.75 are 1/2."""
    scheduler = scheduler_of(4, train_prompts=4, target_zero_variance=0.75, max_skips_factor=1)
    for _ in range(2):
        play(scheduler, first({0: 0, 1: 0, 2: 2, 3: 2}))
    assert scheduler.metrics()["explore_hard"] == pytest.approx(0.49)
    assert scheduler.metrics()["explore_easy"] == pytest.approx(0.51)


def test_without_a_target_nothing_moves():
    scheduler = scheduler_of(3, explore_easy=0.25, explore_hard=0.125)
    for _ in range(20):
        play(scheduler, always(0))
    assert (scheduler.metrics()["explore_easy"], scheduler.metrics()["explore_hard"]) == (0.25, 0.125)


# --- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [None, 0.25])
def test_a_resumed_run_goes_on_exactly(tmp_path, target):
    rates = {prompt: (0.0, 0.05, 0.5, 1.0)[prompt % 4] for prompt in range(15)}

    def play_on(scheduler, num_steps):
        steps = [play_step(scheduler, coin(rates)) for _ in range(num_steps)]
        return [(asks, [row_key(row) for row in batch.rows]) for asks, batch in steps]

    whole, stopped, again = (scheduler_of(15, target_zero_variance=target) for _ in range(3))
    steps = play_on(whole, 40)
    assert play_on(stopped, 23) == steps[:23]
    save_state(tmp_path, stopped.state_dict())
    again.load_state_dict(load_state(tmp_path))
    assert again.metrics() == stopped.metrics()
    assert play_on(again, 17) == steps[23:]
    assert again.ledger.records() == whole.ledger.records()
    assert again.metrics() == whole.metrics()


def test_exploration_that_is_not_adjusted_is_the_new_settings():
    old = scheduler_of(4, target_zero_variance=0.25)
    for _ in range(6):
        play(old, always(0))
    again = scheduler_of(4, explore_easy=0.7, explore_hard=0.9)
    again.load_state_dict(old.state_dict())
    assert (again.metrics()["explore_easy"], again.metrics()["explore_hard"]) == (0.7, 0.9)
    assert again.metrics()["mean_zero_variance_visits"] == old.metrics()["mean_zero_variance_visits"] > 0


def test_a_state_does_not_change_with_the_run_and_a_step_that_was_open_is_forgotten():
    scheduler = scheduler_of(2, target_zero_variance=0.25)
    for _ in range(3):
        play(scheduler, always(0))
    state, z = scheduler.state_dict(), scheduler.metrics()["mean_zero_variance_visits"]
    for _ in range(3):
        play(scheduler, always(1))
    scheduler.tell(answer(scheduler.ask(), always(1), scheduler.step))
    scheduler.load_state_dict(state)
    assert scheduler.metrics()["mean_zero_variance_visits"] == z
    assert scheduler.allocator.state_dict()["was_easy"] == [False, False]
    assert scheduler.ask()


def test_the_history_goes_with_the_prompts_where_these_have_moved():
    """The state names the prompts; one that was not saved has no history, though it had one before."""
    scheduler, other = scheduler_of(3, train_prompts=3), scheduler_of(5, train_prompts=5)
    play(scheduler, first({0: 0, 1: 2, 2: 4}))
    play(other, always(0))
    state = scheduler.allocator.state_dict()
    assert (state["prompts"], state["streaks"], state["was_easy"]) == ([0, 2], [1, 1], [False, True])
    other.allocator.restore(state | {"prompts": [4, 1]}, [])
    assert [other.allocator.skip_probability(p) for p in range(5)] == [0.0, 0.5, 0.0, 0.0, 0.5]
    assert other.allocator.state_dict()["was_easy"] == [True, False]
