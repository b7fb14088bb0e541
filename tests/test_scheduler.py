"""The scheduler: composition of batches, protocol, ends of a run, and resuming as if nothing had happened."""

import copy
import json
import math
from collections import Counter

import numpy as np
import pytest
from core_helpers import always, answer, coin, count, first, pilot_commit, play_step, prompts_of, row_key
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise import (
    ConfigError,
    PilotCommit,
    ProtocolError,
    Replay,
    Rollout,
    RolloutError,
    RolloutScheduler,
    StateError,
    Uniform,
)
from rollwise.allocation import ALLOCATIONS as ALL_ALLOCATIONS
from rollwise.scheduler import STATE_FORMAT
from rollwise.storage import load_state, save_state


def uniform(num_prompts=8, train_prompts=2, num_rollouts=4, **options):
    allocation = Uniform(train_prompts=train_prompts, num_rollouts=num_rollouts)
    return RolloutScheduler(range(num_prompts), allocation=allocation, **options)


def replaying(ratio=0.5, **options):
    return uniform(replay=Replay(**({"ratio": ratio, "warmup_steps": 0} | options)))


def sources(batch):
    return Counter("replay" if row.source == "replay" else "fresh" for row in batch.rows)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "no prompts"),
        (["a", "b", "a", "a"], {}, "2 of 4 prompt ids repeat"),
        (["a", 1], {}, r"\['int', 'str'\]"),
        ([1.5, 2.5], {}, r"\['float'\]"),
        ([None], {}, r"\['NoneType'\]"),
        (["a"], {"patience_prompts": -1}, "patience_prompts is -1"),
        (["a"], {"scale_rewards": "bach"}, "'bach'"),
        (["a"], {"ddof": 3}, "ddof is 3"),
        (["a"], {"std_epsilon": -1.0}, "-1.0"),
    ],
)
def test_settings_are_checked_when_the_scheduler_is_built(ids, options, message):
    """Not in the first batch, after a step's rollouts have been paid for."""
    with pytest.raises(ConfigError, match=message):
        RolloutScheduler(ids, **options)


@pytest.mark.parametrize("ids", [[3, 1, 2], ["c", "a", "b"]])
def test_prompt_ids_from_numpy_are_those_of_python(ids):
    scheduler = RolloutScheduler(np.array(ids))
    asks, _ = play_step(scheduler, first(2))
    assert {type(r.prompt_id) for r in asks[0]} == {type(ids[0])}
    resumed = RolloutScheduler(ids)
    resumed.load_state_dict(scheduler.state_dict())  # the same prompts, not others
    assert play_step(resumed, first(2))[0] == play_step(scheduler, first(2))[0]


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_asking_twice():
    scheduler = uniform()
    requests = scheduler.ask()
    with pytest.raises(ProtocolError, match="2 requests are unanswered"):
        scheduler.ask()
    scheduler.tell(answer(requests, coin(0.5), 0))  # the refused call changed nothing


def test_telling_without_asking():
    scheduler = uniform()
    with pytest.raises(ProtocolError, match="call ask"):
        scheduler.tell([])
    play_step(scheduler, coin(0.5))
    with pytest.raises(ProtocolError, match="call ask"):
        scheduler.tell([Rollout(0, 1.0)])
    scheduler.tell(answer(scheduler.ask(), coin(0.5), 1))
    with pytest.raises(ProtocolError, match="call ask"):
        scheduler.tell([Rollout(0, 1.0)])
    assert scheduler.ledger.totals()["rollouts_generated"] == 16


@pytest.mark.parametrize("allocation", [Uniform(train_prompts=2, num_rollouts=4), pilot_commit()])
def test_a_batch_too_early(allocation):
    scheduler = RolloutScheduler(range(9), allocation=allocation)

    def refused():
        with pytest.raises(ProtocolError, match="until ask\\(\\) returns an empty list"):
            scheduler.batch()

    refused()  # before the first ask
    while True:
        requests = scheduler.ask()
        if not requests:
            break
        refused()  # asked and not told
        scheduler.tell(answer(requests, first(2), 0))
        refused()  # told; whether this was all, only ask() knows
    assert scheduler.batch().rows
    refused()  # a second time


def test_a_batch_between_pilots_and_commits_would_lose_the_step():
    scheduler = RolloutScheduler(range(9), allocation=pilot_commit())
    scheduler.tell(answer(scheduler.ask(), first(4), 0))
    with pytest.raises(ProtocolError):
        scheduler.batch()
    commits = scheduler.ask()
    assert count(commits, "commit") == 8
    scheduler.tell(answer(commits, first(2), 0))
    assert scheduler.ask() == []
    assert len(scheduler.batch().rows) == 24


@pytest.mark.parametrize("wrong", ["too few", "too many", "none", "other prompt", "other order", "unknown prompt"])
def test_rollouts_that_do_not_fit_are_refused_and_nothing_is_taken(wrong):
    scheduler = uniform()
    requests = scheduler.ask()
    rollouts = answer(requests, coin(0.5), 0)
    bad = {
        "too few": rollouts[:-1],
        "too many": [*rollouts, rollouts[0]],
        "none": [],
        "other prompt": [*rollouts[:-1], Rollout(requests[0].prompt_id, 1.0)],
        "other order": rollouts[::-1],
        "unknown prompt": [Rollout("?", 1.0), *rollouts[1:]],
    }[wrong]
    with pytest.raises(RolloutError, match=r"were told where 8 were asked for|was asked for"):
        scheduler.tell(bad)
    assert all(r.purpose == "" and r.birth_step == -1 for r in rollouts)
    assert scheduler.ledger.totals()["rollouts_generated"] == 0
    scheduler.tell(rollouts)  # the right ones are still welcome
    assert scheduler.ask() == []
    assert scheduler.ledger.totals()["rollouts_generated"] == 8
    assert {(r.purpose, r.birth_step) for r in rollouts} == {("uniform", 0)}
    scheduler.batch()


def test_steps_may_skip_and_repeat_but_not_go_back():
    scheduler = uniform()
    for step, expected in ((3, 3), (None, 4), (4, 4), (10, 10)):
        _, batch = play_step(scheduler, coin(0.5), step=step)
        assert batch.step == scheduler.step == expected
    with pytest.raises(ProtocolError, match="step 9 is before step 10"):
        scheduler.ask(9)
    assert scheduler.step == 10
    scheduler.state_dict()  # no step was opened
    requests = scheduler.ask(11)
    scheduler.tell(answer(requests, coin(0.5), 11))
    assert scheduler.ask(2) == []  # the step is only looked at in a step's first call
    assert scheduler.batch().step == 11


def test_a_state_cannot_be_taken_in_mid_step():
    scheduler = uniform()
    requests = scheduler.ask()
    for _ in range(2):
        with pytest.raises(ProtocolError, match="between steps"):
            scheduler.state_dict()
        if requests:
            scheduler.tell(answer(requests, coin(0.5), 0))
            requests = []
    scheduler.ask()
    scheduler.batch()
    scheduler.state_dict()


# --- composition ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "fresh", "drawn"),
    [
        (0.5, 4, 2),
        (0.5, 5, 3),
        (0.5, 3, 2),
        (0.5, 1, 1),
        (0.4, 4, 2),
        (0.3, 4, 1),
        (0.1, 4, 0),
        (1.0, 5, 5),
        (2.0, 3, 6),
    ],
)
def test_the_draw_is_ratio_times_the_fresh_rows_rounded_and_the_fresh_part_is_whole(ratio, fresh, drawn):
    """`fresh` rows carry a gradient; the rest of their group is masked out of the loss."""
    scheduler = RolloutScheduler(
        range(4),
        allocation=Uniform(train_prompts=1, num_rollouts=max(fresh, 2) + 1),
        replay=Replay(ratio=ratio, warmup_steps=0, max_age_steps=100),
    )
    for _ in range(4):
        play_step(scheduler, lambda request, i, step: float(i % 2))

    def some_without_loss(requests):
        rollouts = answer(requests, lambda request, i, step: float(i % 2), 4)
        for rollout in rollouts[fresh:]:
            rollout.num_loss_tokens = 0
        return rollouts

    told = some_without_loss(scheduler.ask())
    scheduler.tell(told)
    assert scheduler.ask() == []
    batch = scheduler.batch()
    assert sources(batch) == Counter(fresh=fresh, replay=drawn)
    assert [row.rollout for row in batch.rows[:fresh]] == told[:fresh]  # fresh first, in order
    assert batch.normalizer_rows == fresh + drawn


def test_the_fresh_rows_are_not_among_the_replayed_of_their_own_step():
    scheduler = replaying(ratio=5.0)
    for _ in range(6):
        _, batch = play_step(scheduler, first(2))
        replayed = [row for row in batch.rows if row.source == "replay"]
        assert {row.age_steps for row in batch.rows if row.source != "replay"} == {0}
        assert all(row.age_steps >= 1 for row in replayed)
        assert len({id(row.rollout) for row in batch.rows}) == len(batch.rows)
    assert len(replayed) == 40


def test_the_draw_is_short_while_the_buffer_is():
    scheduler = replaying(ratio=2.0)
    assert [sources(play_step(scheduler, first(2))[1])["replay"] for _ in range(4)] == [0, 8, 16, 16]


@pytest.mark.parametrize("max_age", [1, 2, 5])
def test_no_row_is_replayed_beyond_the_age_bound(max_age):
    scheduler = replaying(ratio=10.0, max_age_steps=max_age)
    ages = Counter(row.age_steps for _ in range(12) for row in play_step(scheduler, first(2))[1].rows)
    assert set(ages) == set(range(max_age + 1))
    assert len(scheduler.buffer) == 8 * (max_age + 1)  # what is over-aged leaves when the next step draws


def test_ages_are_differences_of_the_trainers_steps():
    scheduler = replaying(ratio=10.0, max_age_steps=7)
    ages = [{row.age_steps for row in play_step(scheduler, first(2), step=t)[1].rows} for t in (0, 3, 7, 20, 22)]
    assert ages == [{0}, {0, 3}, {0, 4, 7}, {0}, {0, 2}]


def test_no_replay_during_the_warm_up_but_the_buffer_fills():
    scheduler = replaying(ratio=1.0, warmup_steps=3)
    assert [sources(play_step(scheduler, first(2))[1])["replay"] for _ in range(5)] == [0, 0, 0, 8, 8]
    assert len(scheduler.buffer) == 40


@pytest.mark.parametrize("replay", [None, Replay(ratio=0)])
def test_no_replay(replay):
    scheduler = uniform(replay=replay)
    for _ in range(30):
        _, batch = play_step(scheduler, first(2))
    assert sources(batch) == Counter(fresh=8)
    assert scheduler.buffer is None
    assert "buffer_rollouts" not in scheduler.metrics()


def test_a_replayed_row_keeps_its_advantage_and_its_baseline():
    """Frozen at birth, even though the prompt's success rate has changed since."""
    scheduler = uniform(1, 1, replay=Replay(ratio=1.0, warmup_steps=0), ddof=0, std_epsilon=0.0)
    _, birth = play_step(scheduler, first(1))
    frozen = {id(row.rollout): row.advantage for row in birth.rows}
    assert sorted(frozen.values()) == pytest.approx([-1 / math.sqrt(3)] * 3 + [math.sqrt(3)])
    _, batch = play_step(scheduler, first(3))
    replayed = [row for row in batch.rows if row.source == "replay"]
    assert {id(row.rollout): row.advantage for row in replayed} == frozen
    assert {row.rollout.group_mean for row in replayed} == {0.25}
    assert {row.rollout.group_mean for row in batch.rows if row.source != "replay"} == {0.75}


def test_every_row_belongs_to_its_rollout():
    """Published code put priorities and tokens on the wrong items; here each array says whose it is."""
    scheduler = replaying(ratio=1.0, max_age_steps=4)
    for _ in range(8):
        _, batch = play_step(scheduler, coin(0.5), payload=True)
        for row in batch.rows:
            step, i, name = row.rollout.payload["ids"][:3]
            assert step == row.rollout.birth_step == batch.step - row.age_steps
            assert name == sum(repr(row.rollout.prompt_id).encode()) + 1000 * len("uniform")
            assert row.rollout.payload["logps"].tolist() == pytest.approx([row.rollout.reward, -0.1 * i])
            assert row.advantage == row.rollout.advantage
            assert (row.advantage > 0) == (row.rollout.reward == 1)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_the_convention_of_the_advantage_is_the_callers(scale, ddof):
    scheduler = uniform(2, 2, 2, scale_rewards=scale, ddof=ddof, std_epsilon=0.25)
    rewards = {0: [0.0, 1.0], 1: [3.0, 5.0]}
    _, batch = play_step(scheduler, lambda request, i, step: rewards[request.prompt_id][i])
    group_std = {0: [0.5, 1.0], 1: [math.sqrt(0.5), math.sqrt(2)]}[ddof]
    batch_std = math.sqrt(14.75 / (4 - ddof))
    for row in batch.rows:
        half = [0.5, 1.0][row.rollout.prompt_id]
        std = {"group": group_std[row.rollout.prompt_id] + 0.25, "batch": batch_std + 0.25, "none": 1.0}[scale]
        assert abs(row.advantage) == pytest.approx(half / std)


# --- normaliser -------------------------------------------------------------------------------------------------------

#: prompt -> (reward, tokens, tokens with loss) of its rollouts
MIXED = {
    "varied": [(0, 10, None), (1, 20, 15), (1, 30, 0), (math.nan, 40, None)],
    "equal": [(1, 1, None), (1, 2, None), (1, 3, None), (1, 4, 2)],
}


@pytest.mark.parametrize(("drop", "rows", "tokens"), [(True, 2, 25), (False, 8, 73)])
def test_what_the_loss_is_divided_by(drop, rows, tokens):
    """Rows with a gradient: 10 + 15 loss tokens. With the others of the batch: + 40 unscored, + 8 without variance."""
    scheduler = RolloutScheduler(
        list(MIXED), allocation=Uniform(train_prompts=2, num_rollouts=4), drop_zero_variance=drop
    )

    def mixed(requests):
        return [
            Rollout(request.prompt_id, reward, num_tokens=n, num_loss_tokens=loss)
            for request in requests
            for reward, n, loss in MIXED[request.prompt_id]
        ]

    scheduler.tell(mixed(scheduler.ask()))
    assert scheduler.ask() == []
    batch = scheduler.batch()
    assert [row.rollout.num_tokens for row in batch.rows] == [10, 20]
    assert (batch.normalizer_rows, batch.normalizer_tokens) == (rows, tokens)
    assert batch.success_rate == pytest.approx(6 / 7)
    outcomes = scheduler.ledger.by_outcome()
    assert {k: v for k, v in outcomes.items() if v} == {"trained": 2, "truncated": 1, "unscored": 1, "zero_variance": 4}


@pytest.mark.parametrize("drop", [True, False])
def test_replayed_rows_count_in_the_normaliser_either_way(drop):
    scheduler = uniform(1, 1, 4, replay=Replay(ratio=1.0, warmup_steps=0), drop_zero_variance=drop)
    play_step(scheduler, first(2), num_tokens=5)
    _, batch = play_step(scheduler, first(2), num_tokens=7)
    assert (batch.normalizer_rows, batch.normalizer_tokens) == (8, 4 * 5 + 4 * 7)
    _, batch = play_step(scheduler, always(1), num_tokens=7)
    assert batch.rows == ()
    assert (batch.normalizer_rows, batch.normalizer_tokens) == ((0, 0) if drop else (4, 28))


def test_pilots_that_were_not_committed_to_are_in_no_normaliser():
    scheduler = RolloutScheduler(range(4), allocation=pilot_commit(train_prompts=1), drop_zero_variance=False)
    _, batch = play_step(scheduler, first(4))
    assert (len(batch.rows), batch.normalizer_rows, batch.normalizer_tokens) == (12, 12, 36)


# --- bad rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_an_unscored_rollout_reaches_nothing_but_the_ledger(bad):
    scheduler = replaying(ratio=1.0)
    for _ in range(4):
        _, batch = play_step(scheduler, lambda request, i, step: bad if i == 1 else float(i % 2 == 0 and i > 1))
        assert all(row.rollout.is_scored and math.isfinite(row.advantage) for row in batch.rows)
        assert sources(batch)["fresh"] == 6
        assert batch.success_rate == pytest.approx(1 / 3)
    assert all(r.is_scored for r in scheduler.buffer.rollouts)
    assert scheduler.ledger.by_outcome()["unscored"] == 8
    assert all(math.isfinite(value) for value in scheduler.metrics().values())


@pytest.mark.parametrize("allocation", ["uniform", "pilot_commit"])
def test_a_reward_of_none_is_unscored_in_every_allocation(allocation):
    scheduler = RolloutScheduler(range(7), allocation=ALLOCATIONS[allocation])
    told = []
    for _ in range(3):
        play_step(scheduler, lambda request, i, step: None if i == 0 else float(i % 2), told=told)
    assert all(math.isnan(r.reward) for r in told if not r.is_scored)
    assert scheduler.ledger.by_outcome()["unscored"] > 0
    assert scheduler.ledger.by_outcome()["trained"] > 0


def test_rewards_of_other_numeric_types_become_floats():
    scheduler = uniform(1, 1)
    told = []
    rewards = [True, np.float32(0.5), 0, np.int64(1)]
    play_step(scheduler, lambda request, i, step: rewards[i], told=told)
    assert [(r.reward, type(r.reward)) for r in told] == [(1.0, float), (0.5, float), (0.0, float), (1.0, float)]


@pytest.mark.parametrize("bad", ["good", [1.0], {}])
def test_a_reward_that_is_no_number_is_refused_and_nothing_is_taken(bad):
    scheduler = uniform(1, 1)
    requests = scheduler.ask()
    with pytest.raises(RolloutError, match="a reward is no number"):
        scheduler.tell(answer(requests, lambda request, i, step: bad if i == 3 else 1.0, 0))
    assert scheduler.ledger.totals()["rollouts_generated"] == 0
    scheduler.tell(answer(requests, first(2), 0))


# --- the end of a run -------------------------------------------------------------------------------------------------

ALLOCATIONS = {
    "uniform": Uniform(train_prompts=2, num_rollouts=4),
    "pilot_commit": pilot_commit(solved_prompts="next_epoch", max_pilot_rounds=2),
    "bound": pilot_commit(solved_prompts="next_epoch", bind_pilots=True, pilot_every_step=False),
}


def run_until_stop(scheduler, reward_of, *, max_steps=200, **options):
    for step in range(max_steps):
        if scheduler.stop_reason is not None:
            return step
        play_step(scheduler, reward_of, **options)
    raise AssertionError("the run does not stop")


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize(
    ("reward", "finding"),
    [(1.0, "all solved"), (0.0, "all hopeless"), (math.nan, "none of their rollouts could be scored")],
)
@pytest.mark.parametrize("num_prompts", [1, 7])
def test_a_data_set_that_teaches_nothing_ends_the_run_with_the_reason(allocation, reward, finding, num_prompts):
    scheduler = RolloutScheduler(
        range(num_prompts),
        allocation=ALLOCATIONS[allocation],
        replay=Replay(ratio=1.0, warmup_steps=0),
        patience_prompts=40,
    )
    run_until_stop(scheduler, always(reward))
    assert finding in scheduler.stop_reason
    assert "patience_prompts is 40" in scheduler.stop_reason
    assert 40 * 4 <= scheduler.ledger.totals()["rollouts_generated"] <= 50 * 8  # bounded work
    assert scheduler.ledger.totals()["rollouts_trained"] == 0
    resumed = RolloutScheduler(range(num_prompts), allocation=ALLOCATIONS[allocation], patience_prompts=40)
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.stop_reason == scheduler.stop_reason


def test_groups_that_never_mix_are_neither_solved_nor_hopeless():
    scheduler = uniform(8, patience_prompts=40)
    run_until_stop(scheduler, lambda request, i, step: float(request.prompt_id % 2))
    assert "50% of their rollouts succeed" in scheduler.stop_reason
    assert "more rollouts per prompt" in scheduler.stop_reason


def test_completions_without_loss_tokens_are_named_as_the_reason():
    """As when truncated ones are masked and all are, or when num_tokens was never filled in."""
    scheduler = uniform(8, patience_prompts=40)
    run_until_stop(scheduler, coin(0.5), num_tokens=0)
    assert "none of their rollouts has a token that carries loss" in scheduler.stop_reason
    assert scheduler.ledger.by_outcome()["truncated"] > 100


@pytest.mark.parametrize(
    ("succeeding", "finding"),
    [(100, "all solved"), (99, "all solved"), (97, "97% of"), (3, "3% of"), (1, "hopeless"), (0, "hopeless")],
)
def test_a_few_exceptions_are_still_almost_all(succeeding, finding):
    """One prompt in 100 without variance; the finding names what nearly all have in common."""
    scheduler = uniform(100, 10, 2, patience_prompts=100)
    run_until_stop(scheduler, lambda request, i, step: float(request.prompt_id < succeeding))
    assert finding in scheduler.stop_reason


def test_one_gradient_resets_the_patience():
    scheduler = uniform(8, patience_prompts=6)
    for _ in range(5):
        play_step(scheduler, always(0))
        play_step(scheduler, always(0))
        assert scheduler.stop_reason is None
        play_step(scheduler, first(1))
    for expected in (False, False, True):
        play_step(scheduler, always(1))
        assert bool(scheduler.stop_reason) == expected
    assert "the last 6 prompts" in scheduler.stop_reason
    assert "all solved" in scheduler.stop_reason  # the zeros before the gradient are forgotten


def test_patience_zero_never_stops():
    scheduler = uniform(8, patience_prompts=0)
    for _ in range(30):
        play_step(scheduler, always(0))
    assert scheduler.stop_reason is None


def test_one_prompt():
    scheduler = uniform(1, 4, replay=Replay(ratio=1.0, warmup_steps=0))
    for t in range(5):
        asks, batch = play_step(scheduler, first(2))
        assert [len(ask) for ask in asks] == [1]
        assert sources(batch) == Counter(fresh=4, replay=4) if t else Counter(fresh=4)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_reported_waste_of_uniform_allocation_is_the_expected_one():
    """p = 0.05 and G = 8: a group is wasted with probability p^G + (1 - p)^G = 0.663."""
    scheduler = uniform(50, 50, 8, seed=3)
    for _ in range(20):
        play_step(scheduler, coin(0.05))
    expected = 0.05**8 + 0.95**8
    deviation = math.sqrt(expected * (1 - expected) / 1000)
    assert scheduler.metrics()["useful_share"] == pytest.approx(1 - expected, abs=3.3 * deviation)


def test_metrics_count():
    scheduler = RolloutScheduler(range(9), allocation=pilot_commit(), replay=Replay(ratio=0.5, warmup_steps=0))
    assert set(scheduler.metrics().values()) == {0.0, 9.0}
    for _ in range(3):
        play_step(scheduler, first(2), payload=True)
    figures = scheduler.metrics()
    assert figures["rollouts_trained"] == 3 * 24
    assert figures["rows_replayed"] == 2 * 12
    assert figures["buffer_rollouts"] == len(scheduler.buffer) == 72
    assert figures["buffer_bytes"] == sum(r.nbytes for r in scheduler.buffer.rollouts) > 0
    assert figures["useful_share"] == figures["rollouts_trained"] / figures["rollouts_generated"]
    assert figures["tokens_generated"] == 3 * figures["rollouts_generated"]
    assert all(type(value) is float for value in figures.values())


# --- the ledger's promise, under random play --------------------------------------------------------------------------

allocations = st.one_of(
    st.builds(Uniform, train_prompts=st.integers(1, 4), num_rollouts=st.integers(2, 5)),
    st.builds(
        PilotCommit,
        train_prompts=st.integers(1, 3),
        pilot_rollouts=st.integers(1, 4),
        commit_rollouts=st.integers(1, 3),
        pilot_prompts=st.integers(1, 6),
        solved_prompts=st.sampled_from(["remove", "next_epoch"]),
        max_survivor_age_steps=st.integers(1, 3),
        bind_pilots=st.booleans(),
        pilot_every_step=st.booleans(),
        max_pilot_rounds=st.integers(1, 3),
    ),
)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 10),
    allocations,
    st.one_of(
        st.none(),
        st.builds(
            Replay,
            ratio=st.sampled_from([0.3, 1.0, 4.0]),
            warmup_steps=st.integers(0, 3),
            max_age_steps=st.sampled_from([None, 1, 3]),
            capacity_rollouts=st.sampled_from([3, 1000]),
        ),
    ),
    st.sampled_from(["group", "batch", "none"]),
    st.booleans(),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.integers(0, 1000),
)
def test_nothing_is_lost_or_counted_twice(num_prompts, allocation, replay, scale, drop, gaps, seed):
    generator = np.random.default_rng(seed)
    scheduler = RolloutScheduler(
        range(num_prompts),
        allocation=allocation,
        replay=replay,
        scale_rewards=scale,
        drop_zero_variance=drop,
        patience_prompts=0,
        seed=seed,
    )
    told: list[Rollout] = []
    trained, replayed, step = 0, 0, 0

    def reward_of(request, i, step):
        return float(generator.choice([0, 1, 0.5, math.nan, math.inf], p=[0.4, 0.3, 0.1, 0.1, 0.1]))

    for gap in gaps:
        step += gap
        while requests := scheduler.ask(step):
            rollouts = answer(requests, reward_of, step, num_tokens=int(generator.integers(0, 4)))
            scheduler.tell(rollouts)
            told += rollouts
            assert sum(scheduler.ledger.by_outcome().values()) == len(told)
        batch = scheduler.batch()
        fresh = [row for row in batch.rows if row.source != "replay"]
        drawn = [row for row in batch.rows if row.source == "replay"]
        trained += len(fresh)
        replayed += len(drawn)
        totals = scheduler.ledger.totals()
        assert totals["rollouts_generated"] == len(told)
        assert totals["rollouts_trained"] == trained
        assert totals["rows_replayed"] == replayed
        assert totals["tokens_generated"] == sum(r.num_tokens for r in told)
        outcomes = scheduler.ledger.by_outcome()
        assert outcomes["pending"] == sum(len(g.rollouts) for g in scheduler.allocator.waiting())
        assert outcomes["unscored"] <= sum(not r.is_scored for r in told)
        assert outcomes["unscored"] + outcomes["pending"] >= sum(not r.is_scored for r in told)
        assert min(outcomes.values()) >= 0
        assert scheduler.ledger.by_purpose() == Counter(r.purpose for r in told)
        for row in batch.rows:
            assert row.rollout.is_scored
            assert row.rollout.loss_tokens > 0
            assert row.age_steps == step - row.rollout.birth_step >= 0
            assert row.advantage == row.rollout.advantage
        assert len({id(row.rollout) for row in fresh}) == len(fresh)
        assert len({id(row.rollout) for row in drawn}) == len(drawn)
        if replay is None or step < replay.warmup_steps:
            assert not drawn
        else:
            assert len(drawn) <= math.floor(replay.ratio * len(fresh) + 0.5)
            assert all(replay.max_age_steps is None or row.age_steps <= replay.max_age_steps for row in drawn)
        assert batch.normalizer_tokens >= sum(row.rollout.loss_tokens for row in batch.rows)
        assert batch.normalizer_rows >= len(batch.rows)
        if drop:
            assert batch.normalizer_rows == len(batch.rows)


# --- same seed, same decisions ----------------------------------------------------------------------------------------

RUNS = {
    "uniform": {
        "allocation": Uniform(train_prompts=3, num_rollouts=4),
        "replay": Replay(ratio=1.0, warmup_steps=2, max_age_steps=4, decay_tau_steps=3.0),
    },
    "pilot_commit": {
        "allocation": pilot_commit(pilot_every_step=False, survivor_selection="max_variance"),
        "replay": Replay(ratio=0.5, warmup_steps=1, capacity_rollouts=40),
    },
    "bound": {
        "allocation": pilot_commit(bind_pilots=True, solved_prompts="next_epoch", pilot_prompts=5),
        "replay": Replay(ratio=1.0, warmup_steps=0, capacity_bytes=900),
    },
    "no replay": {"allocation": pilot_commit(bind_pilots=True)},
}
IDS = [f"prompt {i}" for i in range(17)]


def new_run(name, ids=IDS, **options):
    return RolloutScheduler(ids, **({"seed": 5} | RUNS[name] | options))


def trace_of(scheduler, num_steps, reward_of=None):
    """Everything a step decides, by value."""
    reward_of = reward_of or coin({prompt_id: (i % 5) / 4 for i, prompt_id in enumerate(scheduler.prompt_ids)})
    trace = []
    for _ in range(num_steps):
        asks, batch = play_step(scheduler, reward_of, payload=True)
        numbers = (batch.normalizer_rows, batch.normalizer_tokens, batch.success_rate, batch.step)
        trace.append((asks, [row_key(row) for row in batch.rows], numbers, scheduler.metrics(), scheduler.stop_reason))
    return trace


@pytest.mark.parametrize("name", RUNS)
def test_the_seed_decides(name):
    assert trace_of(new_run(name), 10) == trace_of(new_run(name), 10)
    assert trace_of(new_run(name), 10) != trace_of(new_run(name, seed=6), 10)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("stop_after", [0, 1, 2, 5, 11])
def test_a_resumed_run_is_the_one_that_was_never_stopped(tmp_path, name, stop_after):
    whole = trace_of(new_run(name), 16)
    assert any(rows for _, rows, *_ in whole[stop_after:])
    stopped = new_run(name)
    assert trace_of(stopped, stop_after) == whole[:stop_after]
    save_state(tmp_path, stopped.state_dict())
    trace_of(stopped, 2)  # what it still does before it is killed must not matter
    resumed = new_run(name, seed=99)  # the seed is in the state
    resumed.load_state_dict(load_state(tmp_path))
    assert trace_of(resumed, 16 - stop_after) == whole[stop_after:]
    uninterrupted = new_run(name)
    trace_of(uninterrupted, 16)
    assert resumed.ledger.records() == uninterrupted.ledger.records()


def test_payloads_come_back_with_their_rows(tmp_path):
    for name in ("uniform", "bound"):
        scheduler = new_run(name)
        trace_of(scheduler, 5)
        save_state(tmp_path / name, scheduler.state_dict())
        resumed = new_run(name)
        resumed.load_state_dict(load_state(tmp_path / name))
        replayed = 0
        for _ in range(3):
            for row in play_step(resumed, coin(0.5), payload=True)[1].rows:
                step, i, name_sum = row.rollout.payload["ids"][:3]
                assert step == row.rollout.birth_step
                assert name_sum == sum(repr(row.rollout.prompt_id).encode()) + 1000 * len(row.rollout.purpose)
                assert row.rollout.payload["logps"].tolist() == pytest.approx([row.rollout.reward, -0.1 * i])
                replayed += row.age_steps > 0
        assert replayed > 0


@pytest.mark.parametrize("name", RUNS)
def test_a_scheduler_that_was_in_mid_step_can_be_set_back(name):
    scheduler = new_run(name)
    trace_of(scheduler, 3)
    state = copy.deepcopy(scheduler.state_dict())
    expected = trace_of(scheduler, 4)
    scheduler.ask()  # unanswered
    scheduler.load_state_dict(copy.deepcopy(state))
    assert trace_of(scheduler, 4) == expected
    scheduler.tell(answer(scheduler.ask(), coin(0.5), scheduler.step))  # answered, not trained on
    scheduler.load_state_dict(copy.deepcopy(state))
    assert trace_of(scheduler, 4) == expected


def test_the_state_is_json_but_for_the_rollouts():
    scheduler = new_run("bound")
    trace_of(scheduler, 4)
    state = scheduler.state_dict()
    assert all(isinstance(r, Rollout) for r in state.pop("rollouts"))
    assert json.loads(json.dumps(state)) == state


# --- several processes ------------------------------------------------------------------------------------------------


def play_ranks(schedulers, num_steps, reward_of):
    """All ranks in lock-step, as after an all-gather: the same scalars everywhere, each payload on one rank."""
    trace = []
    for _ in range(num_steps):
        asks = []
        while True:
            requests = [scheduler.ask() for scheduler in schedulers]
            assert all(r == requests[0] for r in requests), "ranks disagree"
            if not requests[0]:
                break
            asks.append(requests[0])
            for rank, scheduler in enumerate(schedulers):
                rollouts = answer(requests[0], reward_of, scheduler.step, payload=True)
                for i, rollout in enumerate(rollouts):
                    rollout.owner = i % len(schedulers)
                    if rollout.owner != rank:
                        rollout.payload = None
                scheduler.tell(rollouts)
        batches = [scheduler.batch() for scheduler in schedulers]
        keys = [[row_key(row) for row in batch.rows] for batch in batches]
        assert all(k == keys[0] for k in keys)
        for rows in zip(*(batch.rows for batch in batches), strict=True):
            holders = [rank for rank, row in enumerate(rows) if row.rollout.payload is not None]
            assert holders == [rows[0].rollout.owner]
            held = rows[holders[0]].rollout
            assert held.payload["ids"][0] == held.birth_step
            assert held.payload["logps"][0] == held.reward
        trace.append((asks, keys[0], schedulers[0].ledger.totals()))
    return trace


@pytest.mark.parametrize("now", [1, 2, 3])
@pytest.mark.parametrize("name", ["uniform", "bound"])
def test_two_processes_resumed_as_one_two_or_three(tmp_path, name, now):
    rewards = coin({prompt_id: (i % 5) / 4 for i, prompt_id in enumerate(IDS)})
    whole = play_ranks([new_run(name) for _ in range(2)], 9, rewards)
    ranks = [new_run(name) for _ in range(2)]
    assert play_ranks(ranks, 4, rewards) == whole[:4]
    for rank, scheduler in enumerate(ranks):
        save_state(tmp_path, scheduler.state_dict(), rank=rank, world_size=2)
    resumed = [new_run(name, seed=rank) for rank in range(now)]
    for rank, scheduler in enumerate(resumed):
        scheduler.load_state_dict(load_state(tmp_path, rank=rank, world_size=now))
    assert play_ranks(resumed, 5, rewards) == whole[4:]
    assert {row[-1] for _, rows, _ in whole[4:] for row in rows} >= {"replay"}


# --- states that do not fit -------------------------------------------------------------------------------------------


def assert_refused_untouched(scheduler, state, message):
    before = scheduler.state_dict()
    with pytest.raises(StateError, match=message):
        scheduler.load_state_dict(state)
    assert scheduler.state_dict() == before


def test_a_state_of_prompts_that_have_vanished_is_refused():
    state = new_run("bound").state_dict()
    for other, number in ((IDS[:-1], 1), ([i.upper() for i in IDS], 17), (list(range(17)), 17)):
        message = f"{number} of the 17 prompts of the saved state are not among the {len(other)} of this run, such as"
        assert_refused_untouched(new_run("bound", ids=other), state, message)


def test_numbers_are_other_prompts_than_their_text():
    numbers, text = RolloutScheduler([1, 2]), RolloutScheduler(["1", "2"])
    assert_refused_untouched(text, numbers.state_dict(), "2 of the 2 prompts of the saved state")


MANY = [f"prompt {i}" for i in range(200)]


@pytest.mark.parametrize("allocation", ALL_ALLOCATIONS)
def test_a_run_goes_on_with_prompts_reordered_and_added(tmp_path, allocation):
    """Within the epoch the same prompts are asked for where none was added; one that was has its turn."""
    make = {
        "uniform": Uniform(train_prompts=3, num_rollouts=4),
        "pilot_commit": pilot_commit(bind_pilots=True, solved_prompts="retire", retire_rollouts=8, pilot_prompts=5),
        "belief": ALL_ALLOCATIONS["belief"](train_prompts=3, explore_share=0.0, cooldown_steps=0),
    }
    settings = make.get(allocation) or ALL_ALLOCATIONS[allocation](train_prompts=3)
    rates = {prompt_id: (i % 5) / 4 for i, prompt_id in enumerate(MANY)}
    reward_of = coin(rates | {"new 1": 0.5, "new 2": 0.5})

    def run(ids):
        return RolloutScheduler(ids, allocation=settings, replay=Replay(warmup_steps=0), seed=5, patience_prompts=0)

    stopped = run(MANY)
    trace_of(stopped, 4, reward_of)
    save_state(tmp_path, stopped.state_dict())
    reordered = run(MANY[::-1])
    reordered.load_state_dict(load_state(tmp_path))
    if allocation != "belief":  # which draws from positions at random, and has no epochs
        assert [t[:2] for t in trace_of(reordered, 3, reward_of)] == [t[:2] for t in trace_of(stopped, 3, reward_of)]
    trace_of(reordered, 20, reward_of)
    grown = run(["new 1", *MANY[::-1], "new 2"])
    grown.load_state_dict(load_state(tmp_path))
    asked = set()
    for asks, *_ in trace_of(grown, 60, reward_of):
        asked |= {request.prompt_id for requests in asks for request in requests}
    assert {"new 1", "new 2"} <= asked or allocation == "belief"


def test_what_is_known_of_a_prompt_moves_with_it(tmp_path):
    allocation = ALL_ALLOCATIONS["belief"](train_prompts=20, cooldown_steps=0)
    one = RolloutScheduler(MANY, allocation=allocation, seed=1)
    trace_of(one, 5)
    save_state(tmp_path, one.state_dict())
    other = RolloutScheduler(["new", *MANY[::-1]], allocation=allocation, seed=1)
    other.load_state_dict(load_state(tmp_path))
    counts = dict(zip(other.prompt_ids, other.allocator._counts_P2.tolist(), strict=True))
    assert counts == dict(zip(MANY, one.allocator._counts_P2.tolist(), strict=True)) | {"new": [0.0, 0.0]}


def test_a_state_of_another_allocation_is_refused():
    assert_refused_untouched(
        new_run("bound"), new_run("uniform").state_dict(), "allocation 'uniform', this run has 'pilot_commit'"
    )


@pytest.mark.parametrize("change", [{"format": STATE_FORMAT + 1}, {"format": None}])
def test_a_state_of_another_format_is_refused(change):
    state = new_run("bound").state_dict() | change
    assert_refused_untouched(new_run("bound"), state, f"format {change['format']!r}, this version reads {STATE_FORMAT}")
    assert_refused_untouched(new_run("bound"), {}, "format None")


@pytest.mark.parametrize("lost", [1, 5])
def test_a_state_with_rollouts_missing_is_refused(lost):
    scheduler = new_run("bound")
    trace_of(scheduler, 4)
    state = scheduler.state_dict()
    state["rollouts"] = state["rollouts"][:-lost]
    assert_refused_untouched(new_run("bound"), state, "rollouts where")


def test_a_ledger_of_another_version_is_refused_before_anything_is_loaded():
    scheduler = new_run("bound")
    trace_of(scheduler, 2)
    state = scheduler.state_dict()
    state["ledger"] = {"generated": [[0, "pilot", "vanished", 1, 1]], "replayed": []}
    assert_refused_untouched(new_run("bound"), state, "vanished")


def test_replay_may_be_switched_off_or_made_smaller_at_a_resume():
    scheduler = new_run("uniform")
    trace_of(scheduler, 6)
    state = scheduler.state_dict()
    without = new_run("uniform", replay=None)
    without.load_state_dict(state)
    assert {row[-1] for _, rows, *_ in trace_of(without, 3) for row in rows} == {"uniform"}
    smaller = new_run("uniform", replay=Replay(ratio=1.0, warmup_steps=0, capacity_rollouts=7))
    smaller.load_state_dict(state)
    assert len(smaller.buffer) == 7
    youngest = sorted(r.birth_step for r in state["rollouts"])[-7:]
    assert sorted(r.birth_step for r in smaller.buffer.rollouts) == youngest


def test_prompts_are_asked_for_by_the_callers_ids():
    scheduler = RolloutScheduler(["x", "y", "z"], allocation=pilot_commit())
    assert set(prompts_of(scheduler.ask(), "pilot")) == {"x", "y", "z"}


def test_an_unknown_baseline_is_refused():
    with pytest.raises(ConfigError, match="baseline is 'value'; it must be 'group' or 'critic'"):
        RolloutScheduler([0, 1], baseline="value")
