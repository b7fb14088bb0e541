"""Successive elimination, round by round: who leaves, what is trained on, and what a group is cut down to."""

import math
from collections import defaultdict

import pytest
from core_helpers import always, answer, play_step, row_key

from rollwise import ConfigError, RolloutScheduler, SuccessiveElimination
from rollwise.storage import load_state, save_state


def scheduler_of(num_prompts, *, seed=0, threshold=1.0, **options):
    settings = {"train_prompts": 3, "round_rollouts": 2, "max_rounds": 3, "min_successes": 1, "min_failures": 1}
    allocation = SuccessiveElimination(**(settings | options), success_threshold=threshold)
    return RolloutScheduler(range(num_prompts), allocation=allocation, seed=seed, ddof=0, std_epsilon=0.0)


def in_turn(rewards):
    """Each prompt's rewards one after the other, over all its rounds."""
    asked = defaultdict(int)

    def reward_of(request, i, step):
        asked[request.prompt_id] += 1
        return rewards[request.prompt_id][asked[request.prompt_id] - 1]

    return reward_of


def outcomes(scheduler):
    return {name: number for name, number in scheduler.ledger.by_outcome().items() if number}


def rewards_of(batch, prompt):
    return [row.rollout.reward for row in batch.rows if row.rollout.prompt_id == prompt]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_prompts": 0}, "train_prompts is 0"),
        ({"round_rollouts": 0}, "round_rollouts is 0"),
        ({"max_rounds": 0}, "max_rounds is 0"),
        ({"min_successes": -1}, "min_successes is -1; it must be at least 0"),
        ({"min_failures": -1}, "min_failures is -1; it must be at least 0"),
        ({"round_rollouts": 1, "max_rounds": 1, "min_failures": 0}, "at least 2 rollouts to vary"),
        ({"round_rollouts": 2, "max_rounds": 2, "min_successes": 3}, "min_successes 3 and min_failures 2 .* the 4 of"),
        ({"group_rollouts": 1}, "group_rollouts is 1; .* or None"),
    ],
)
def test_settings_out_of_bounds_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SuccessiveElimination(**options)


def test_the_defaults_are_the_official_codes_balanced_choice():
    """But for the cut to 4 rollouts: training on all of a prompt's rollouts has the paper's baseline."""
    settings = SuccessiveElimination()
    assert (settings.round_rollouts, settings.max_rounds) == (8, 4)
    assert settings.min_successes == settings.min_failures == 4 // 2
    assert settings.group_rollouts is None


def test_it_chooses_its_prompts_itself():
    scheduler = scheduler_of(5)
    with pytest.raises(ConfigError, match="ask without `prompts`"):
        scheduler.ask(prompts=[1])
    assert scheduler.ask()  # the refused call left no trace


# --- the rounds -------------------------------------------------------------------------------------------------------


def test_a_prompt_leaves_once_it_has_shown_both_outcomes():
    scheduler = scheduler_of(3)
    asks, batch = play_step(scheduler, in_turn({0: [1, 0], 1: [0, 0, 0, 1], 2: [0] * 6}))
    assert [sorted(request.prompt_id for request in ask) for ask in asks] == [[0, 1, 2], [1, 2], [2]]
    assert [{(r.purpose, r.num_rollouts) for r in ask} for ask in asks] == [
        {("uniform", 2)},
        {("resample", 2)},
        {("resample", 2)},
    ]
    assert rewards_of(batch, 0) == [1, 0]
    assert rewards_of(batch, 1) == [0, 0, 0, 1]
    assert outcomes(scheduler) == {"trained": 6, "zero_variance": 6}
    assert scheduler.ledger.by_purpose() == {"uniform": 6, "resample": 6}
    assert scheduler.metrics()["sampling_rounds"] == 3
    assert scheduler.metrics()["varying_share"] == pytest.approx(2 / 3)


def test_the_rounds_of_a_prompt_are_one_group():
    """One success among four: advantages sqrt(3) and -sqrt(1/3) over both rounds."""
    scheduler = scheduler_of(1)
    _, batch = play_step(scheduler, in_turn({0: [0, 0, 0, 1]}))
    assert [row.advantage for row in batch.rows] == pytest.approx([-(3**-0.5)] * 3 + [3**0.5])
    assert {(row.rollout.group_mean, row.age_steps) for row in batch.rows} == {(0.25, 0)}
    assert [row.source for row in batch.rows] == ["uniform"] * 2 + ["resample"] * 2


@pytest.mark.parametrize(
    ("least", "rewards", "rounds"),
    [
        ((1, 1), [0, 1], 1),
        ((2, 1), [0, 1, 0, 1], 2),
        ((2, 2), [1, 1, 1, 0, 0, 1], 3),
        ((1, 0), [1, 1], 1),  # Reinforce-Ada-pos: a success is enough
        ((1, 0), [0, 0, 0, 1], 2),
        ((0, 2), [0, 0], 1),
        ((0, 0), [1, 1], 1),  # plain GRPO
        ((3, 3), [1, 1, 1, 0, 0, 1], 3),  # never: it ends with the last round
    ],
)
def test_how_many_of_each_outcome_it_takes_to_leave(least, rewards, rounds):
    scheduler = scheduler_of(1, min_successes=least[0], min_failures=least[1])
    asks, batch = play_step(scheduler, in_turn({0: rewards}))
    assert len(asks) == rounds
    assert len(batch.rows) == (2 * rounds if len(set(rewards)) == 2 else 0)


def test_a_prompt_that_shows_too_few_of_one_outcome_is_trained_on_all_the_same():
    scheduler = scheduler_of(1, min_successes=2, min_failures=2)
    _, batch = play_step(scheduler, in_turn({0: [0, 0, 0, 1, 0, 0]}))
    assert rewards_of(batch, 0) == [0, 0, 0, 1, 0, 0]


def test_part_marks_are_successes_by_the_threshold():
    for threshold, rounds in ((1.0, 3), (0.5, 1)):
        scheduler = scheduler_of(1, threshold=threshold)
        asks, _ = play_step(scheduler, in_turn({0: [0.5, 0.2] * 3}))
        assert len(asks) == rounds


@pytest.mark.parametrize("reward", [0.0, 1.0, math.nan, None, math.inf])
@pytest.mark.parametrize("num_prompts", [1, 2, 7])
def test_a_data_set_without_variance_ends_after_the_rounds(reward, num_prompts):
    scheduler = scheduler_of(num_prompts, max_rounds=5)
    asks, batch = play_step(scheduler, always(reward))
    assert [len(ask) for ask in asks] == [min(num_prompts, 3)] * 5
    assert batch.rows == ()
    scored = reward in (0.0, 1.0)
    assert outcomes(scheduler) == {"zero_variance" if scored else "unscored": min(num_prompts, 3) * 5 * 2}
    assert scheduler.allocator.exhausted is None


def test_unscored_rollouts_show_nothing():
    scheduler = scheduler_of(2)
    asks, batch = play_step(scheduler, in_turn({0: [1, math.nan, 0, None], 1: [math.inf, 1, 1, -math.inf, 1, 1]}))
    assert [sorted(request.prompt_id for request in ask) for ask in asks] == [[0, 1], [0, 1], [1]]
    assert rewards_of(batch, 0) == [1, 0]
    assert outcomes(scheduler) == {"trained": 2, "zero_variance": 4, "unscored": 4}


# --- downsampling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "num_kept", "kept"),
    [
        ([1, 1, 0, 1, 0, 1, 1, 0], 4, [0, 1, 2, 4]),  # 5 and 3: two of each, the first ones
        ([0, 0, 0, 0, 0, 1, 0, 0], 4, [0, 1, 2, 5]),  # 1 and 7: the one, and three
        ([1, 1, 1, 0, 1, 1, 1, 1], 4, [0, 1, 2, 3]),  # 7 and 1
        ([1, 0, 1, 0, 1, 0, 0, 0], 5, [0, 1, 2, 3, 5]),  # an odd one goes to the failures
        ([1, 0, 1, 0, 1, 0, 0, 0], 2, [0, 1]),
        ([1, 0, 1, 0, 1, 0, 0, 0], 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([1, 0, 1, 0, 1, 0, 0, 0], 20, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0.5, 0.5, 0.5, 0.3, 0.4, 0.5, 0.5, 0.5], 2, [0, 3]),  # all failures: what is kept varies all the same
        ([1, 1, 1, 1, 1, 2, 1, 1], 4, [0, 1, 2, 5]),  # all successes
        ([math.nan, 1, 1, 0, math.nan, 0, 1, 0], 4, [1, 2, 3, 5]),
        ([math.nan, 1, 1, 0, math.nan, math.nan, 1, math.nan], 4, [1, 2, 3, 6]),
    ],
)
def test_a_group_is_cut_down_as_balanced_as_it_comes(rewards, num_kept, kept):
    scheduler = scheduler_of(1, round_rollouts=8, max_rounds=1, group_rollouts=num_kept)
    told = []
    _, batch = play_step(scheduler, in_turn({0: rewards}), told=told)
    scored = [i for i in range(8) if math.isfinite(rewards[i])]
    assert all(row.rollout is told[i] for row, i in zip(batch.rows, kept, strict=True))
    expected = {"trained": len(kept), "downsampled": len(scored) - len(kept), "unscored": 8 - len(scored)}
    assert outcomes(scheduler) == {name: number for name, number in expected.items() if number}
    mean = sum(rewards[i] for i in kept) / len(kept)
    assert {row.rollout.group_mean for row in batch.rows} == {mean}  # the baseline is that of what is trained on


def test_a_group_is_cut_down_over_all_its_rounds():
    scheduler = scheduler_of(1, group_rollouts=2)
    _, batch = play_step(scheduler, in_turn({0: [0, 0, 0, 0, 0, 1]}))
    assert rewards_of(batch, 0) == [0, 1]
    assert [row.source for row in batch.rows] == ["uniform", "resample"]
    assert outcomes(scheduler) == {"trained": 2, "downsampled": 4}


# --- resume -----------------------------------------------------------------------------------------------------------


def by_step(request, i, step):
    """Half of the prompts vary; a function of what is asked and when, so that it replays."""
    return float((3 * i + step + request.prompt_id) % 5 == 0 and request.prompt_id % 2 == 0)


def test_a_resumed_run_goes_on_exactly(tmp_path):
    def play(scheduler, num_steps):
        steps = [play_step(scheduler, by_step) for _ in range(num_steps)]
        return [(asks, [row_key(row) for row in batch.rows]) for asks, batch in steps]

    whole, stopped, again = (scheduler_of(11, group_rollouts=3) for _ in range(3))
    steps = play(whole, 20)
    assert any(rows for _, rows in steps[8:])
    assert play(stopped, 8) == steps[:8]
    save_state(tmp_path, stopped.state_dict())
    again.load_state_dict(load_state(tmp_path))
    assert again.metrics() == stopped.metrics()
    assert play(again, 12) == steps[8:]
    assert again.ledger.records() == whole.ledger.records()


def test_a_step_that_was_open_is_forgotten():
    scheduler = scheduler_of(9)
    state = scheduler.state_dict()
    scheduler.tell(answer(scheduler.ask(), always(0), 0))
    scheduler.ask()
    scheduler.load_state_dict(state)
    asks, batch = play_step(scheduler, lambda request, i, step: float(i))
    assert [[r.purpose for r in ask] for ask in asks] == [["uniform"] * 3]
    assert len(batch.rows) == 6
