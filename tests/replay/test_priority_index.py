"""The priority index: the exact distribution of its draws on every path, its weights, and a plain dict as its model."""

import math
from collections import Counter

import numpy as np
import pytest
from core_helpers import P_BOUND, chi_square_p_value, sequential_probabilities
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise import ConfigError
from rollwise.replay import priority_index
from rollwise.replay.priority_index import PriorityIndex

REPEATS = 6000
SCATTERED = [3, 17, 18, 300, 701, 702, 1500, 4000]  # alone in their block, neighbours, far apart
# From how many live slots on: the race ends, and rows of blocks are searched in place of blocks.
PATHS = {"race": (10**9, 10**9), "blocks": (0, 10**9), "rows": (0, 0)}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    take(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=["blocks", "rows"])
def block_path(request, monkeypatch):
    take(request.param, monkeypatch)
    return request.param


def take(name, monkeypatch):
    race, search = PATHS[name]
    monkeypatch.setattr(priority_index, "_RACE_UP_TO", race)
    monkeypatch.setattr(priority_index, "_RACE_PER_DRAW", race)
    monkeypatch.setattr(priority_index, "_SEARCH_UP_TO", search)


def index_of(log_keys, slots=SCATTERED):
    index = PriorityIndex()
    index.set(slots[: len(log_keys)], log_keys)
    return index


def rng(seed=0):
    return np.random.default_rng(seed)


def observed_draws(log_keys, num_draws, seed=1, repeats=REPEATS):
    """Ordered draws, as positions in `log_keys`."""
    index, generator = index_of(log_keys), rng(seed)
    position = {slot: i for i, slot in enumerate(SCATTERED)}
    return Counter(tuple(position[s] for s in index.draw(num_draws, generator).tolist()) for _ in range(repeats))


def weights_of(index, slots):
    return index._weights_N[np.asarray(slots)]


def assert_sums_are_right(index):
    assert np.array_equal(index._block_sums, priority_index._sum_rows(index._weights_N))
    assert np.isfinite(index._block_sums).all()


# --- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "num_draws"),
    [
        ([1, 1, 1, 1], 2),
        ([0.5, 1, 2, 4], 3),
        ([100, 1, 1, 1, 1], 2),
        ([5, 1, 4, 0.2, 3, 2, 1, 0.05], 3),
        ([9, 3, 1], 1),
        ([7, 2], 2),
        ([1e4, 1e3, 10, 1, 2], 4),  # several rounds, then the drawn are taken out of the sums
    ],
)
def test_ordered_draws_have_the_sequential_probabilities(path, weights, num_draws):
    draws = observed_draws(np.log(weights), num_draws)
    assert chi_square_p_value(draws, sequential_probabilities(weights, num_draws)) > P_BOUND


@pytest.mark.parametrize("gap", [5.0, 40.0, 600.0, 743.0, 2000.0, 1e6])
def test_what_is_left_after_a_heavy_one_is_drawn_by_its_own_weights(path, gap):
    """At 743 the weights left are a few of float64's smallest steps, at 2000 they are 0: the draw ends as a race."""
    log_keys = np.log([1.0, 2.0, 3.0, 4.0]) - gap
    draws = observed_draws([0.0, *log_keys], 3, repeats=3000)
    if gap == 5.0:
        expected = sequential_probabilities(np.exp([0.0, *log_keys]), 3)
    else:
        rest = sequential_probabilities([1, 2, 3, 4], 2)
        expected = {(0, *(i + 1 for i in order)): p for order, p in rest.items()}
    assert chi_square_p_value(draws, expected) > P_BOUND


@pytest.mark.parametrize(
    "log_keys",
    [
        np.log(5e-324) + np.log([1, 2, 3]),  # denormal weights
        np.log(5e-324) + np.log([1, 2, 3]) - 5,  # 0 in float64
        1e6 + np.log([1, 2, 3]),  # exp() overflows
        -1e6 + np.log([1, 2, 3]),
    ],
)
def test_only_differences_of_log_keys_matter(path, log_keys):
    assert chi_square_p_value(observed_draws(log_keys, 2), sequential_probabilities([1, 2, 3], 2)) > P_BOUND


def test_denormal_weights_beside_a_heavy_one_that_is_removed(path):
    index = index_of([0.0, *(math.log(5e-324) + math.log(w) for w in (1, 2, 3))])
    index.remove([SCATTERED[0]])
    generator = rng(2)
    draws = Counter(tuple(SCATTERED.index(s) - 1 for s in index.draw(2, generator).tolist()) for _ in range(REPEATS))
    assert chi_square_p_value(draws, sequential_probabilities([1, 2, 3], 2)) > P_BOUND


@pytest.mark.parametrize("gap", [5.0, 40.0, 600.0])
def test_no_race_over_all_is_needed_for_a_few_heavy_ones(block_path, gap, monkeypatch):
    monkeypatch.setattr(priority_index, "draw_without_replacement", None)
    index = index_of([0.0, 1.0, *(np.arange(6) - gap)])
    for seed in range(200):
        assert len(set(index.draw(4, rng(seed)).tolist())) == 4


def test_every_gap_is_found_when_each_round_finds_one(block_path):
    """60 weights, each 5e8 times the next: 12 rounds are not enough, nor is the range of float64."""
    slots = 7 * np.arange(60)
    index = PriorityIndex()
    index.set(slots, -20.0 * np.arange(60))
    weights = index._weights_N.copy()
    assert index.draw(40, rng()).tolist() == slots[:40].tolist()
    assert np.array_equal(index._weights_N, weights)
    assert_sums_are_right(index)


def test_the_paths_have_the_same_distribution_of_a_large_draw(block_path):
    """How often each of 2000 slots is among 300, against the race."""
    log_keys = rng(3).normal(size=2000)
    slots = rng(4).permutation(6000)[:2000]
    by_blocks, index = np.zeros(6000), PriorityIndex()
    index.set(slots, log_keys)
    generator = rng(5)
    for _ in range(400):
        by_blocks[index.draw(300, generator)] += 1
    by_race = np.zeros(6000)
    for _ in range(400):
        by_race[slots[priority_index.draw_without_replacement(log_keys, 300, generator)]] += 1
    variance = by_race * (1 - by_race / 400) + by_blocks * (1 - by_blocks / 400)
    mixed = variance > 10
    z = (by_race - by_blocks)[mixed] / np.sqrt(variance[mixed])
    assert mixed.sum() > 1000
    assert abs(np.mean(z**2) - 1) < 4 * math.sqrt(2 / mixed.sum())


# --- degenerate draws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3, 1e5, 1e300])
@pytest.mark.parametrize("num_live", [1, 2, 40, 700])
def test_a_draw_of_nearly_all_or_all(path, scale, num_live):
    """Where weights underflow, a draw that needs them must not come back with what was removed."""
    generator = rng(6)
    index = PriorityIndex()
    index.set(np.arange(2000), generator.normal(size=2000))
    log_keys = scale * generator.standard_normal(num_live)
    slots = generator.permutation(2000)[:num_live]
    index.remove(np.setdiff1d(np.arange(2000), slots))
    index.set(slots, log_keys)
    assert len(index) == num_live
    for num_draws in {max(1, num_live - 1), num_live, num_live + 5}:
        drawn = index.draw(num_draws, generator).tolist()
        assert len(drawn) == len(set(drawn)) == min(num_draws, num_live)
        assert set(drawn) <= set(slots.tolist())
    assert_sums_are_right(index)


def test_many_ties_are_drawn_once_each(path):
    index = PriorityIndex()
    index.set(np.arange(500), np.full(500, 123.0))
    drawn = index.draw(500, rng()).tolist()
    assert sorted(drawn) == list(range(500))
    assert drawn != list(range(500))


def test_a_key_of_minus_infinity_is_as_if_removed(path):
    index = index_of([0.0, -math.inf, math.log(2), -math.inf])
    assert len(index) == 2
    draws = Counter(index.draw(4, rng(seed)).tolist()[0] for seed in range(50))
    assert set(draws) == {SCATTERED[0], SCATTERED[2]}
    index.set([SCATTERED[0], SCATTERED[1]], [-math.inf, 5.0])
    assert len(index) == 2
    assert index.log_keys(SCATTERED[:4]).tolist() == [-math.inf, 5.0, math.log(2), -math.inf]


@pytest.mark.parametrize("num_draws", [-1, 0, 3])
def test_nothing_to_draw(path, num_draws):
    for index in (PriorityIndex(), PriorityIndex(100), index_of([-math.inf])):
        drawn = index.draw(num_draws, rng())
        assert drawn.shape == (0,)
        assert np.arange(3)[drawn].tolist() == []  # usable as an index
    assert len(index_of([1.0]).draw(min(num_draws, 0), rng())) == 0


@pytest.mark.parametrize("total", [5e-324, 1e-310, 1.0, 1e300])
def test_a_weight_of_zero_is_never_picked_even_by_the_largest_uniform(total):
    weights = np.zeros((5, priority_index._WIDTH))
    weights[np.arange(5), [0, 1, 7, 14, 15]] = total
    for uniform in (0.0, 0.5, np.nextafter(1, 0)):
        picked = priority_index._pick(weights.ravel(), np.arange(5), np.full(5, uniform))
        assert (picked % priority_index._WIDTH).tolist() == [0, 1, 7, 14, 15]


# --- the weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_step", [0, 10**6])
def test_the_weights_are_the_refreshed_priorities(first_step):
    """After insertions, updates and removals over 1500 steps: priority x decay, every one computed anew."""
    alpha, tau, max_age, generator = 0.6, 500.0, 400, rng(7)
    index, bases, births = PriorityIndex(offset=alpha * first_step / tau), {}, {}
    for step in range(first_step, first_step + 1500):
        slots = (8 * (step - first_step) + np.arange(8)) % 4000
        new = generator.lognormal(sigma=2, size=8)
        index.set(slots, alpha * (np.log(new) + step / tau))
        bases |= dict(zip(slots.tolist(), new.tolist(), strict=True))
        births |= dict.fromkeys(slots.tolist(), step)
        drawn = index.draw(4, generator)
        new = generator.lognormal(sigma=2, size=4)[: len(drawn)]
        drawn_births = np.array([births[s] for s in drawn.tolist()])
        index.set(drawn, alpha * (np.log(new) + drawn_births / tau))
        bases |= dict(zip(drawn.tolist(), new.tolist(), strict=True))
        old = [s for s in slots.tolist() if step - births[s] > max_age]
        assert not old
        aged = (8 * (step - first_step - max_age) + np.arange(8)) % 4000
        if step - first_step >= max_age:
            index.remove(aged)
            for slot in aged.tolist():
                del bases[slot], births[slot]
    slots = np.array(sorted(bases))
    expected = np.array([(bases[s] * math.exp(-(step - births[s]) / tau)) ** alpha for s in slots.tolist()])
    got = weights_of(index, slots)
    assert len(index) == len(slots) == 8 * max_age
    assert np.abs(got / got.sum() - expected / expected.sum()).sum() / 2 < 1e-12
    assert got.sum() == pytest.approx(index._block_sums.sum(), rel=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("tau", [1.0, 30.0])
def test_a_million_steps(block_path, tau):
    """Every 50th of them. exp(birth / tau) leaves float64 after 709 tau."""
    generator = rng(8)
    index, live = PriorityIndex(), {}
    for i, step in enumerate(range(0, 10**6 + 1, 50)):
        slots = (6 * i + np.arange(6)) % 60
        keys = generator.normal(size=6) + step / tau
        index.set(slots, keys)
        live |= dict(zip(slots.tolist(), keys.tolist(), strict=True))
        if i >= 8:
            aged = (6 * (i - 8) + np.arange(6)) % 60
            index.remove(aged)
            for slot in aged.tolist():
                del live[slot]
        if i % 10 == 0 or step == 10**6:
            drawn = index.draw(9, generator).tolist()
            assert len(drawn) == len(set(drawn)) == min(9, len(live))
            assert set(drawn) <= set(live)
    slots = np.array(sorted(live))
    expected = np.exp(np.array([live[s] for s in slots.tolist()]) - max(live.values()))
    got = weights_of(index, slots)
    assert np.abs(got / got.sum() - expected / expected.sum()).sum() / 2 < 1e-12
    assert_sums_are_right(index)


def test_keys_that_fall_are_not_lost(block_path):
    """The large keys leave, and those after them are 0 relative to the old offset."""
    index, generator = PriorityIndex(), rng(9)
    for level in (0.0, 1e5, -1e5, 3e4, -1e6):
        index.set(np.arange(100), generator.normal(size=100) + level)
        assert len(set(index.draw(30, generator).tolist())) == 30
        assert abs(index.offset - level) < 10
        assert_sums_are_right(index)


# --- rebuilt ----------------------------------------------------------------------------------------------------------


def rebuilt_from(index, generator):
    slots = generator.permutation(np.flatnonzero(index._log_keys_N > -math.inf))
    rebuilt = PriorityIndex(offset=index.offset)
    for part in np.array_split(slots, 3):
        rebuilt.set(part, index.log_keys(part))
    return rebuilt


def assert_the_same(index, rebuilt, num_draws, seed):
    n = min(index.capacity, rebuilt.capacity)
    assert np.array_equal(index._weights_N[:n], rebuilt._weights_N[:n])
    assert np.array_equal(index._block_sums[: n // 16], rebuilt._block_sums[: n // 16])
    for k in (1, num_draws):
        assert index.draw(k, rng(seed)).tolist() == rebuilt.draw(k, rng(seed)).tolist()


def test_an_index_rebuilt_from_its_keys_draws_the_same(path):
    """After any history, bit for bit, in whatever order the slots come back; and it goes on the same."""
    generator = rng(10)
    index = PriorityIndex()
    for step in range(0, 3000, 30):
        index.set(generator.permutation(1500)[:20], generator.normal(size=20) * 3 + step / 2)
        index.remove(generator.permutation(1500)[:10])
        index.draw(7, generator)
        if step % 300 == 0:
            rebuilt = rebuilt_from(index, generator)
            assert_the_same(index, rebuilt, 12, seed=step)
            for one in (index, rebuilt):
                one.set([5, 400], [step / 2 + 400, step / 2 + 600.0])  # moves the offset
            assert index.offset == rebuilt.offset
            assert_the_same(index, rebuilt, 12, seed=step + 1)


@pytest.mark.parametrize("num_slots", [900, 30_000, 200_000])
def test_a_large_index_rebuilt_draws_the_same(num_slots):
    """With the thresholds as they are: a race, blocks, rows of blocks."""
    generator = rng(11)
    index = PriorityIndex()
    index.set(np.arange(num_slots), 3 * generator.normal(size=num_slots))
    index.remove(generator.permutation(num_slots)[: num_slots // 7])
    index.set(index.draw(500, generator), generator.normal(size=500) + 2)
    assert_the_same(index, rebuilt_from(index, generator), 256, seed=12)


def test_room_does_not_matter(path):
    small, large = PriorityIndex(), PriorityIndex(100_000)
    for index in (small, large):
        index.set(SCATTERED, np.arange(8.0))
    assert small.capacity < large.capacity
    assert small.draw(5, rng(13)).tolist() == large.draw(5, rng(13)).tolist()


# --- against a plain dict ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hundred_thousand_operations_against_a_dict(path):
    generator = rng(14)
    index, model = PriorityIndex(), {}
    for step in range(2500):
        bound = 40 if step % 500 < 100 else 3000  # now few, now many
        if step % 500 == 0:
            index.remove(list(model))
            model.clear()
        slots = generator.permutation(bound)[: generator.integers(0, 40)]
        keys = generator.choice([1.0, 30.0, 900.0]) * generator.normal(size=len(slots)) + step
        keys[generator.random(len(slots)) < 0.1] = -math.inf
        index.set(slots, keys)
        model |= dict(zip(slots.tolist(), keys.tolist(), strict=True))
        removed = generator.permutation(bound + 5000)[: generator.integers(0, 60)]
        index.remove(removed)
        for slot in removed.tolist():
            model.pop(slot, None)
        live = {slot for slot, key in model.items() if key > -math.inf}
        assert len(index) == len(live)
        num_draws = int(generator.integers(0, 25))
        drawn = index.draw(num_draws, generator).tolist()
        assert len(drawn) == len(set(drawn)) == min(num_draws, len(live))
        assert set(drawn) <= live
        if step % 50 == 0:
            assert index.log_keys(list(model)).tolist() == list(model.values())
            assert_sums_are_right(index)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.dictionaries(st.integers(0, 600), st.floats(-1e5, 1e5) | st.just(-math.inf))),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 700))),
        st.tuples(st.just("draw"), st.integers(0, 30)),
    ),
    max_size=20,
)


@settings(max_examples=150, deadline=None)
@given(operations, st.sampled_from(sorted(PATHS)), st.integers(0, 2**32))
def test_any_operations_against_a_dict(steps, path, seed):
    with pytest.MonkeyPatch.context() as monkeypatch:
        take(path, monkeypatch)
        index, model, generator = PriorityIndex(), {}, rng(seed)
        for name, argument in steps:
            live = {slot for slot, key in model.items() if key > -math.inf}
            if name == "set":
                index.set(list(argument), list(argument.values()))
                model |= argument
            elif name == "remove":
                index.remove(sorted(argument))
                model = {slot: key for slot, key in model.items() if slot not in argument}
            else:
                drawn = index.draw(argument, generator).tolist()
                assert len(drawn) == len(set(drawn)) == min(argument, len(live))
                assert set(drawn) <= live
        assert len(index) == sum(key > -math.inf for key in model.values())
        assert index.log_keys(list(model)).tolist() == list(model.values())
        assert_the_same(index, rebuilt_from(index, generator), 9, seed)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "log_keys", "message"),
    [
        ([0, -1], [1.0, 1.0], "slot -1 is negative"),
        ([4, 2, 4], [1.0, 1.0, 2.0], "slot 4 is given more than once"),
        ([1, 2], [1.0, math.nan], "the log key of slot 2 is nan"),
        ([1, 2], [math.inf, 1.0], "the log key of slot 1 is inf"),
        ([1, 2], [1.0], r"slots have the shape \(2,\), log_keys \(1,\)"),
        ([[1, 2]], [[1.0, 2.0]], r"slots have the shape \(1, 2\)"),
        ([1.0, 2.0], [1.0, 2.0], "dtype float64; give a list of integers"),
    ],
)
def test_refused_and_nothing_is_set(slots, log_keys, message):
    index = index_of([1.0, 2.0])
    before = index._log_keys_N.copy(), index._weights_N.copy(), len(index), index.offset
    with pytest.raises(ConfigError, match=message):
        index.set(slots, log_keys)
    after = index._log_keys_N, index._weights_N, len(index), index.offset
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("slots", "message"), [([-2], "slot -2 is negative"), ([3, 3], "slot 3 is given more")])
def test_removing_is_refused_alike(slots, message):
    index = index_of([1.0, 2.0])
    with pytest.raises(ConfigError, match=message):
        index.remove(slots)
    assert len(index) == 2


def test_removing_what_is_not_there_does_nothing():
    index = index_of([1.0, 2.0])
    index.remove([0, 1, 10**9])
    index.remove([])
    assert len(index) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": -1}, "capacity is -1"),
        ({"offset": math.nan}, "offset is nan"),
        ({"offset": math.inf}, "offset is"),
    ],
)
def test_settings_out_of_bounds_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PriorityIndex(**arguments)


class FailingGenerator:
    """Fails in the fifth round, when slots are taken out of the sums."""

    def __init__(self):
        self.rounds = 0

    def random(self, shape):
        self.rounds += 1
        if self.rounds == 5:
            raise KeyboardInterrupt
        return rng().random(shape)


def test_a_draw_that_is_interrupted_leaves_no_trace(block_path):
    index = index_of([0.0, -50.0, -100.0, -150.0])
    weights = index._weights_N.copy()
    with pytest.raises(KeyboardInterrupt):
        index.draw(4, FailingGenerator())
    assert np.array_equal(index._weights_N, weights)
    assert_sums_are_right(index)
