"""The prompt pool: an epoch is a permutation, whatever the draws look like."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise import StateError
from rollwise.allocation import PromptPool


def pool_of(num_prompts, seed=0):
    return PromptPool(num_prompts, np.random.default_rng(seed))


def order_of(num_prompts, seed=0):
    """The order in which a pool of this seed hands out its first epoch."""
    return pool_of(num_prompts, seed).draw(num_prompts)


@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 5, 2], [3, 0, 9], [7, 4, 1]])
def test_an_epoch_is_a_permutation_however_it_is_cut(sizes):
    pool = pool_of(12)
    drawn = [prompt for size in sizes for prompt in pool.draw(size)]
    assert sorted(drawn) == list(range(12))
    assert drawn == order_of(12)


def test_epochs_have_different_orders_and_are_counted():
    pool = pool_of(50)
    orders, epochs = [], []
    for _ in range(4):
        orders.append(tuple(pool.draw(50)))
        epochs.append(pool.epoch)
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert np.diff(epochs).tolist() == [1, 1, 1]


def test_the_order_is_the_seeds():
    assert order_of(50, seed=1) == order_of(50, seed=1)
    assert order_of(50, seed=1) != order_of(50, seed=2)


def test_every_order_is_equally_likely():
    orders = Counter(tuple(pool.draw(3)) for pool in [pool_of(3)] for _ in range(1200))
    assert len(orders) == 6
    assert min(orders.values()) > 140  # 200 expected, 4.6 standard deviations below
    assert all(type(prompt) is int for order in orders for prompt in order)


@pytest.mark.parametrize("first", [1, 3, 4])
def test_an_epoch_that_ends_in_mid_draw_goes_on_into_the_next(first):
    pool = pool_of(5)
    drawn = pool.draw(first)
    crossing = pool.draw(4)
    assert len(set(crossing)) == 4  # no prompt twice in one draw, though two epochs feed it
    assert sorted(drawn + crossing[: 5 - first]) == list(range(5))
    begun = crossing[5 - first :]
    assert sorted(begun + pool.draw(5 - len(begun))) == list(range(5))  # the second epoch, too, is whole


def test_no_draw_larger_than_the_pool_repeats_a_prompt():
    pool = pool_of(4)
    for _ in range(20):
        assert sorted(pool.draw(100)) == [0, 1, 2, 3]


def test_excluded_prompts_keep_their_place():
    order = order_of(6)
    pool = pool_of(6)
    assert pool.draw(2, exclude={order[0], order[3]}) == [order[1], order[2]]
    assert pool.draw(1, exclude={order[3]}) == [order[0]]
    assert pool.draw(3) == [order[3], order[4], order[5]]
    assert pool.epoch == 1
    pool = pool_of(6)
    assert pool.draw(2, exclude={order[0], order[1]}) == [order[2], order[3]]
    assert pool.draw(4) == [order[0], order[1], order[4], order[5]]


def test_excluding_everything_that_is_left_begins_the_next_epoch_without_losing_a_prompt():
    order = order_of(3)
    pool = pool_of(3)
    pool.draw(2)
    drawn = pool.draw(2, exclude={order[2]})
    assert sorted(drawn) == sorted(order[:2])
    assert pool.draw(1) == [order[2]]


def test_excluding_every_prompt_draws_nothing_and_burns_no_epoch():
    pool = pool_of(4)
    for _ in range(5):
        assert pool.draw(2, exclude={0, 1, 2, 3}) == []
    assert pool.epoch <= 1
    assert sorted(pool.draw(4)) == [0, 1, 2, 3]


def test_a_removed_prompt_is_never_drawn_again():
    pool = pool_of(6)
    order = pool.draw(2)
    pool.remove(order[0])  # drawn already in this epoch
    ahead = next(p for p in order_of(6) if p not in order)
    pool.remove(ahead)  # not drawn yet
    pool.remove(ahead)
    assert pool.num_live == 4
    drawn = [prompt for _ in range(30) for prompt in pool.draw(3)]
    assert set(drawn) == set(range(6)) - {order[0], ahead}
    counts = Counter(drawn)
    assert max(counts.values()) - min(counts.values()) <= 1  # the rest shares the epochs evenly


def test_the_last_live_prompt_and_then_none():
    pool = pool_of(3)
    pool.remove(0)
    pool.remove(2)
    assert [pool.draw(2) for _ in range(3)] == [[1], [1], [1]]
    pool.remove(1)
    assert pool.num_live == 0
    assert pool.draw(2) == []


def test_excluding_a_removed_prompt_does_not_hide_a_live_one():
    pool = pool_of(3)
    pool.draw(3)
    pool.remove(0)
    assert sorted(pool.draw(3, exclude={0})) == [1, 2]
    assert pool.draw(3, exclude={0, 1}) == [2]


def test_drawing_nothing_changes_nothing():
    pool, twin = pool_of(4), pool_of(4)
    for _ in range(10):
        assert pool.draw(0) == []
    assert pool.draw(4) == twin.draw(4)


def test_state_round_trip_through_json_with_the_generators_state():
    pool = pool_of(7)
    pool.draw(5)
    pool.remove(3)
    state = json.loads(json.dumps(pool.state_dict()))
    generator = np.random.default_rng(99)
    generator.bit_generator.state = pool._rng.bit_generator.state
    resumed = PromptPool(7, generator)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.num_live) == (pool.epoch, pool.num_live)
    assert [resumed.draw(4) for _ in range(10)] == [pool.draw(4) for _ in range(10)]


def test_a_state_does_not_change_with_the_pool_it_came_from():
    pool = pool_of(7)
    pool.draw(2)
    state = pool.state_dict()
    before = json.dumps(state)
    pool.draw(9)
    pool.remove(1)
    assert json.dumps(state) == before


def test_a_state_of_more_prompts_is_refused():
    with pytest.raises(StateError, match="is of 8 prompts, this run has 7"):
        pool_of(7).load_state_dict(pool_of(8).state_dict())


def test_new_prompts_have_their_turn_in_the_epoch_that_is_under_way():
    places = Counter()
    for seed in range(300):
        pool, old = pool_of(8, seed), pool_of(5, seed)
        old.draw(2)
        pool.load_state_dict(old.state_dict())
        pool.add([5, 6, 7])
        rest = pool.draw(6)
        assert pool.epoch == 1
        assert sorted(rest) == sorted({*old.draw(3), 5, 6, 7})
        places[rest.index(6)] += 1
    assert set(places) == set(range(6))  # anywhere in what is left


operations = st.lists(
    st.one_of(
        st.tuples(st.just("draw"), st.integers(0, 12), st.frozensets(st.integers(0, 9), max_size=8)),
        st.tuples(st.just("remove"), st.integers(0, 9), st.just(frozenset())),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 10), operations, st.integers(0, 100))
def test_any_sequence_of_draws_exclusions_and_removals(num_prompts, sequence, seed):
    pool = pool_of(num_prompts, seed)
    removed: set[int] = set()
    for kind, number, exclude in sequence:
        if kind == "remove":
            if number < num_prompts:
                pool.remove(number)
                removed.add(number)
            continue
        exclude = exclude & set(range(num_prompts))
        drawn = pool.draw(number, exclude)
        can_be_drawn = set(range(num_prompts)) - removed - exclude
        assert len(drawn) == len(set(drawn)) == min(number, len(can_be_drawn))
        assert set(drawn) <= can_be_drawn
        assert pool.num_live == num_prompts - len(removed)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 10), st.lists(st.integers(0, 12), min_size=5, max_size=40), st.integers(0, 100), st.data())
def test_removals_leave_every_epoch_even(num_prompts, sizes, seed, data):
    """Without exclusions, two live prompts are never drawn a different number of times, bar the open epoch's one."""
    pool = pool_of(num_prompts, seed)
    counts = Counter(dict.fromkeys(range(num_prompts), 0))
    for size in sizes:
        counts.update(pool.draw(size))
        if len(counts) > 1 and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(counts)))
            pool.remove(gone)
            del counts[gone]
        assert max(counts.values()) - min(counts.values()) <= 1
