"""What a batch is made of: its fresh rows and a draw beside them, or a draw from both."""

from collections import Counter

import pytest

from rollwise import Replay, Rollout, RolloutScheduler, Uniform
from rollwise.storage import load_state, save_state


def scheduler(**replay):
    return RolloutScheduler(
        range(50),
        allocation=Uniform(train_prompts=4, num_rollouts=4),
        replay=Replay(**({"composition": "pool", "warmup_steps": 0, "max_age_steps": 3} | replay)),
        seed=1,
    )


def step(one, number=None):
    """One step in which three of four prompts have two outcomes; returns the told rollouts and the batch."""
    told = []
    while requests := one.ask(number):
        for p, request in enumerate(requests):
            told += [
                Rollout(request.prompt_id, float(p > 0 and i < p), num_tokens=3, payload=None)
                for i in range(request.num_rollouts)
            ]
        one.tell(told)
    return told, one.batch()


@pytest.mark.parametrize(("ratio", "expected"), [(0.3, 16), (0.5, 18), (1.0, 24)])
def test_a_pool_batch_is_drawn_from_fresh_and_stored_rows(ratio, expected):
    one = scheduler(ratio=ratio)
    shares = Counter()
    for t in range(30):
        told, batch = step(one)
        ids = [id(row.rollout) for row in batch.rows]
        assert len(set(ids)) == len(ids)
        assert len(ids) == (12 if t == 0 else expected)
        assert max(row.age_steps for row in batch.rows) <= 3
        for row in batch.rows:
            is_fresh = any(row.rollout is rollout for rollout in told)
            assert row.source == ("uniform" if is_fresh else "replay")
            assert is_fresh == (row.age_steps == 0)
        shares.update(row.source for row in batch.rows)
        assert len({id(r) for r in told} - set(ids)) > 4 or t < 3  # not all fresh rows are in the batch
    assert shares["replay"] > shares["uniform"]


def test_every_rollout_of_a_pool_ends_in_one_outcome():
    one = scheduler(ratio=0.25, max_age_steps=2)
    used = Counter()
    for _ in range(25):
        _, batch = step(one)
        used.update(id(row.rollout) for row in batch.rows)
        one.kept = [*getattr(one, "kept", []), *batch.rows]  # ids stay unique
        outcomes = one.ledger.by_outcome()
        assert sum(outcomes.values()) == 16 * (one.step + 1)
        assert outcomes["trained"] == len(used)
        assert outcomes["pending"] == sum(rollout.num_uses == 0 for rollout in one.buffer.rollouts)
        assert outcomes["zero_variance"] == 4 * (one.step + 1)
    assert outcomes["aged_out"] > 0
    assert one.ledger.totals()["rows_replayed"] == sum(used.values()) - len(used) > 0


def test_warm_up_trains_on_the_fresh_rows():
    one = scheduler(warmup_steps=3)
    for _ in range(3):
        _, batch = step(one)
        assert [row.source for row in batch.rows] == ["uniform"] * 12
    outcomes = one.ledger.by_outcome()
    assert outcomes["trained"] == 36
    for _ in range(10):
        step(one)
    assert sum(one.ledger.by_outcome().values()) == 16 * 13
    assert min(one.ledger.by_outcome().values()) >= 0


@pytest.mark.parametrize("capacity", [1, 5, 12])
def test_a_buffer_smaller_than_a_batch_counts_right(capacity):
    for composition in ("pool", "fresh_anchored"):
        one = scheduler(composition=composition, capacity_rollouts=capacity, warmup_steps=2, max_uses=1)
        for _ in range(8):
            _, batch = step(one)
            assert min(one.ledger.by_outcome().values()) >= 0
            assert sum(one.ledger.by_outcome().values()) == 16 * (one.step + 1)
            assert len(one.buffer) <= capacity
        assert len(batch.rows) >= 1


@pytest.mark.parametrize("drop", [True, False])
def test_the_normaliser_counts_what_is_in_the_batch(drop):
    one = RolloutScheduler(
        range(50),
        allocation=Uniform(train_prompts=4, num_rollouts=4),
        replay=Replay(composition="pool", warmup_steps=0),
        drop_zero_variance=drop,
    )
    for _ in range(5):
        _, batch = step(one)
        assert batch.normalizer_rows == len(batch.rows) + (0 if drop else 4)
        assert batch.normalizer_tokens == 3 * batch.normalizer_rows


def test_a_resumed_pool_goes_on_as_if_it_had_not_stopped(tmp_path):
    def play(one, steps):
        return [
            [(r.rollout.prompt_id, r.source, r.age_steps, r.rollout.num_uses) for r in step(one)[1].rows]
            for _ in range(steps)
        ]

    expected = play(scheduler(), 12)
    stopped = scheduler()
    play(stopped, 6)
    save_state(tmp_path, stopped.state_dict())
    resumed = scheduler()
    resumed.load_state_dict(load_state(tmp_path))
    assert play(resumed, 6) == expected[6:]
    assert resumed.ledger.by_outcome()["aged_out"] > 0


# --- replay-only updates --------------------------------------------------------------------------------------------


def test_k_replay_only_steps_follow_each_fresh_one():
    one = scheduler(composition="fresh_anchored", ratio=0.5, updates_per_fresh=2)
    sources = []
    for _ in range(9):
        told, batch = step(one)
        sources.append((len(told), Counter(row.source for row in batch.rows)))
    fresh = (16, Counter(uniform=12, replay=6))
    assert sources[0] == (16, Counter(uniform=12))
    assert sources[1:] == [(0, Counter(replay=12))] * 2 + ([fresh] + [(0, Counter(replay=12))] * 2) * 2
    assert one.ledger.totals()["rollouts_generated"] == 48
    assert one.ledger.totals()["rows_replayed"] == 6 * 12 + 2 * 6


def test_replay_only_steps_alone_without_replay_beside_fresh_rows():
    one = scheduler(composition="fresh_anchored", ratio=0.0, updates_per_fresh=1)
    assert [len(step(one)[0]) for _ in range(6)] == [16, 0] * 3


def test_a_replay_only_step_needs_something_to_draw():
    one = scheduler(composition="fresh_anchored", ratio=0.0, updates_per_fresh=3, max_uses=1)
    told = [len(step(one)[0]) for _ in range(6)]
    assert told == [16, 0] * 3  # the first replay-only step uses everything up, so that the next one generates


def test_a_replay_only_step_does_not_draw_what_is_too_old():
    one = scheduler(composition="fresh_anchored", ratio=0.0, updates_per_fresh=2)
    assert [len(step(one, number)[0]) for number in (0, 3, 9)] == [16, 0, 16]


def test_a_replay_only_step_is_as_large_as_the_last_fresh_part_that_had_rows():
    one = scheduler(composition="fresh_anchored", ratio=0.0, updates_per_fresh=1, max_age_steps=None)
    assert [len(step(one)[1].rows) for _ in range(2)] == [12, 12]
    while requests := one.ask():
        one.tell([Rollout(r.prompt_id, 1.0, num_tokens=3) for r in requests for _ in range(r.num_rollouts)])
    assert one.batch().rows == ()
    assert len(step(one)[1].rows) == 12


def test_warm_up_generates_in_every_step():
    one = scheduler(composition="fresh_anchored", updates_per_fresh=1, warmup_steps=3)
    assert [len(step(one)[0]) for _ in range(7)] == [16, 16, 16, 0, 16, 0, 16]


def test_replay_only_steps_count_for_age_and_not_for_patience():
    one = RolloutScheduler(
        range(50),
        allocation=Uniform(train_prompts=4, num_rollouts=4),
        replay=Replay(ratio=0.0, updates_per_fresh=2, warmup_steps=0, max_age_steps=3),
        patience_prompts=9,
    )
    step(one)
    for _ in range(3):  # the fourth step is no update on replayed rows alone
        while requests := one.ask():
            one.tell([Rollout(r.prompt_id, 1.0, num_tokens=3) for r in requests for _ in range(r.num_rollouts)])
        batch = one.batch()
    assert (one.step, one.stop_reason, batch.rows) == (3, None, ())
    for _ in range(8):
        while requests := one.ask():
            one.tell([Rollout(r.prompt_id, 1.0, num_tokens=3) for r in requests for _ in range(r.num_rollouts)])
        one.batch()
        if one.stop_reason:
            break
    assert "12 prompts in a row" in one.stop_reason


def test_turnover_is_the_share_that_came_with_the_last_batch():
    one = scheduler(composition="fresh_anchored", max_age_steps=None)
    for t in range(4):
        step(one)
        assert one.metrics()["buffer_turnover"] == 1 / (t + 1)
