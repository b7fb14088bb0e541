"""The replay buffer against plain dictionaries, and its priorities against the formula that refreshes everything."""

import math
from collections import Counter

import numpy as np
import pytest
from core_helpers import P_BOUND, chi_square_p_value, sequential_probabilities
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollwise import ConfigError, Replay, ReplayBuffer, Rollout


def rollout(birth_step=0, advantage=1.0, nbytes=0, prompt_id="p"):
    return Rollout(prompt_id, 1.0, birth_step=birth_step, advantage=advantage, nbytes=nbytes)


def buffer_of(rollouts, **replay):
    buffer = ReplayBuffer(Replay(**({"max_age_steps": None} | replay)))
    buffer.insert(rollouts)
    return buffer


def rng(seed=0):
    return np.random.default_rng(seed)


def held_births(buffer):
    return sorted(r.birth_step for r in buffer.rollouts)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ratio", -0.5),
        ("ratio", math.nan),
        ("ratio", math.inf),
        ("alpha", -1),
        ("alpha", math.nan),
        ("epsilon", -1e-6),
        ("warmup_steps", -1),
        ("max_age_steps", 0),
        ("max_age_steps", -3),
        ("decay_tau_steps", 0),
        ("decay_tau_steps", -1.0),
        ("decay_tau_steps", math.nan),
        ("capacity_rollouts", 0),
        ("capacity_bytes", 0),
        ("capacity_rollouts", 10.5),
        ("updates_per_fresh", 0.5),
        ("max_age_steps", math.nan),
        ("max_age_steps", "10"),
        ("ratio", "0.5"),
        ("per_beta", "0.4"),
        ("max_uses", 1.5),
    ],
)
def test_settings_out_of_bounds_are_refused_by_name_and_value(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        Replay(**{name: value})


def test_the_defaults_are_the_papers():
    defaults = Replay()
    assert (defaults.ratio, defaults.alpha, defaults.epsilon) == (0.5, 0.5, 1e-6)
    assert (defaults.max_age_steps, defaults.warmup_steps, defaults.capacity_rollouts) == (10, 20, 30_000)
    assert defaults.decay_tau_steps is None


# --- the age bound ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_age", [1, 2, 10])
def test_the_age_bound_holds_at_the_draw(max_age):
    """The paper's printed loop evicts after the draw, and lets an age of max_age + 1 be drawn."""
    buffer = buffer_of([rollout(birth_step=5)], max_age_steps=max_age)
    assert len(buffer.draw(1, 5 + max_age, rng())) == 1
    assert buffer.draw(1, 5 + max_age + 1, rng()) == []
    assert len(buffer) == 0


@pytest.mark.parametrize("num_draws", [0, 1, 100])
def test_every_draw_drops_the_over_aged_even_one_of_nothing(num_draws):
    buffer = buffer_of([rollout(birth_step=t, nbytes=10) for t in range(6)], max_age_steps=2)
    drawn = buffer.draw(num_draws, 6, rng())
    assert held_births(buffer) == [4, 5]
    assert buffer.nbytes == 20
    assert len(drawn) == min(num_draws, 2)


def test_without_a_bound_nothing_is_too_old():
    buffer = buffer_of([rollout(birth_step=0)], max_age_steps=None)
    assert len(buffer.draw(1, 10**6, rng())) == 1


def test_births_out_of_order_are_evicted_by_birth_not_by_position():
    buffer = buffer_of([rollout(birth_step=t) for t in (7, 3, 9, 4, 8, 3)], max_age_steps=4)
    buffer.evict(11)
    assert held_births(buffer) == [7, 8, 9]
    assert [r.birth_step for r in buffer.rollouts] == [7, 9, 8]  # those that stay keep their order
    assert {r.birth_step for r in buffer.draw(10, 12, rng())} == {8, 9}


# --- capacity ---------------------------------------------------------------------------------------------------------


def test_capacity_by_count_keeps_the_youngest():
    buffer = buffer_of([], capacity_rollouts=3)
    for t in range(10):
        buffer.insert([rollout(birth_step=t)])
        assert held_births(buffer) == list(range(max(0, t - 2), t + 1))


def test_one_insertion_larger_than_the_capacity():
    assert held_births(buffer_of([rollout(birth_step=t) for t in range(10)], capacity_rollouts=4)) == [6, 7, 8, 9]


def test_of_the_same_age_the_first_inserted_goes_first():
    rollouts = [rollout(birth_step=1, prompt_id=i) for i in range(5)]
    assert [r.prompt_id for r in buffer_of(rollouts, capacity_rollouts=2).rollouts] == [3, 4]


def test_capacity_evicts_by_age_when_births_come_out_of_order():
    """A survivor's pilots, four steps old, must not push out rollouts of the last step."""
    buffer = buffer_of([rollout(birth_step=8), rollout(birth_step=9)], capacity_rollouts=3)
    buffer.insert([rollout(birth_step=5), rollout(birth_step=10)])
    assert held_births(buffer) == [8, 9, 10]
    buffer = buffer_of([rollout(9, nbytes=10), rollout(5, nbytes=10), rollout(10, nbytes=10)], capacity_bytes=20)
    assert held_births(buffer) == [9, 10]


@pytest.mark.parametrize(
    ("sizes", "capacity", "kept"),
    [
        ([10, 10, 10], 30, [0, 1, 2]),  # exactly full
        ([10, 10, 10], 29, [1, 2]),
        ([10, 10, 10], 20, [1, 2]),
        ([10, 10, 10], 19, [2]),
        ([1, 100, 1], 100, [2]),  # dropping the 1 is not enough
        ([1, 50, 50], 100, [1, 2]),
        ([10, 10, 1000], 100, []),  # one that is larger than the cap is not kept
        ([0, 0, 10, 0, 10], 10, [3, 4]),
        ([0, 0, 0], 1, [0, 1, 2]),
    ],
)
def test_capacity_by_bytes(sizes, capacity, kept):
    rollouts = [rollout(birth_step=t, nbytes=n) for t, n in enumerate(sizes)]
    at_once = buffer_of(rollouts, capacity_bytes=capacity)
    assert held_births(at_once) == kept
    assert at_once.nbytes == sum(sizes[t] for t in kept) <= capacity
    one_by_one = buffer_of([], capacity_bytes=capacity)
    for one in rollouts:
        one_by_one.insert([one])
        assert one_by_one.nbytes <= capacity
    assert held_births(one_by_one) == kept


def test_a_long_run_stays_within_both_caps():
    buffer = buffer_of([], capacity_rollouts=50, capacity_bytes=1000, max_age_steps=3)
    generator = rng()
    for t in range(200):
        buffer.draw(5, t, generator)
        buffer.insert([rollout(birth_step=t, nbytes=int(n)) for n in generator.integers(0, 90, 20)])
        assert len(buffer) <= 50
        assert buffer.nbytes == sum(r.nbytes for r in buffer.rollouts) <= 1000


# --- what is drawn ----------------------------------------------------------------------------------------------------


def brute_force_weights(advantages, births, step, *, alpha, epsilon, tau):
    """(base * exp(-age / tau))^alpha, as published: every weight recomputed at every step."""
    decays = [math.exp(-(step - birth) / tau) if tau else 1.0 for birth in births]
    return [((abs(a) + epsilon) * decay) ** alpha for a, decay in zip(advantages, decays, strict=True)]


@pytest.mark.parametrize("options", [{}, {"alpha": 0.6, "decay_tau_steps": 3.0}, {"alpha": 1.0}, {"alpha": 2.0}])
def test_draws_follow_priority_times_decay(options):
    advantages, births = [2.0, -2.0, 0.5, 0.1, -1.0], [0, 6, 3, 9, 9]
    items = enumerate(zip(advantages, births, strict=True))
    buffer = buffer_of([rollout(b, a, prompt_id=i) for i, (a, b) in items], **options)
    weights = brute_force_weights(
        advantages, births, 10, alpha=options.get("alpha", 0.5), epsilon=1e-6, tau=options.get("decay_tau_steps")
    )
    generator = rng(4)
    observed = Counter(tuple(r.prompt_id for r in buffer.draw(2, 10, generator)) for _ in range(8000))
    assert chi_square_p_value(observed, sequential_probabilities(weights, 2)) > P_BOUND


def test_the_sign_of_the_advantage_does_not_matter():
    buffer = buffer_of([])
    keys = buffer.log_keys(np.array([1.5, -1.5]), np.array([3, 3]))
    assert keys[0] == keys[1]


@pytest.mark.parametrize("tau", [None, 2.0])
def test_alpha_zero_is_uniform_with_and_without_decay(tau):
    births = [0, 3, 6, 9]
    advantages = [1e-9, 5.0, 100.0, 0.0]
    rollouts = [rollout(b, a, prompt_id=i) for i, (a, b) in enumerate(zip(advantages, births, strict=True))]
    buffer = buffer_of(rollouts, alpha=0.0, decay_tau_steps=tau)
    generator = rng(1)
    observed = Counter(tuple(r.prompt_id for r in buffer.draw(2, 10, generator)) for _ in range(6000))
    assert chi_square_p_value(observed, sequential_probabilities([1] * 4, 2)) > P_BOUND


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_epsilon_zero_never_draws_an_advantage_of_zero(alpha):
    rollouts = [rollout(advantage=a, prompt_id=i) for i, a in enumerate([0.0, 1.0, -0.0, 1e-300])]
    buffer = buffer_of(rollouts, epsilon=0.0, alpha=alpha)
    for seed in range(100):
        assert {r.prompt_id for r in buffer.draw(4, 1, rng(seed))} == {1, 3}


def test_epsilon_zero_and_only_zero_advantages_draws_nothing():
    buffer = buffer_of([rollout(advantage=0.0) for _ in range(5)], epsilon=0.0, decay_tau_steps=2.0)
    assert buffer.draw(3, 1, rng()) == []
    assert len(buffer) == 5


def test_with_an_epsilon_all_priorities_zero_is_uniform():
    """No starvation, and no division by a total of zero."""
    buffer = buffer_of([rollout(advantage=0.0, prompt_id=i) for i in range(4)])
    generator = rng(2)
    observed = Counter(tuple(r.prompt_id for r in buffer.draw(1, 1, generator)) for _ in range(3000))
    assert chi_square_p_value(observed, sequential_probabilities([1] * 4, 1)) > P_BOUND


def test_many_equal_priorities_are_drawn_once_each():
    """Published code compares two dicts when scores tie."""
    buffer = buffer_of([rollout(prompt_id=i) for i in range(500)])
    drawn = [r.prompt_id for r in buffer.draw(500, 1, rng())]
    assert sorted(drawn) == list(range(500))
    assert drawn != list(range(500))
    assert len(buffer.draw(501, 1, rng())) == 500


@pytest.mark.parametrize("num_draws", [0, -1, 3])
def test_an_empty_buffer_gives_nothing(num_draws):
    assert buffer_of([]).draw(num_draws, 5, rng()) == []


def test_a_draw_leaves_the_rollouts_in_the_buffer():
    buffer = buffer_of([rollout(prompt_id=i) for i in range(10)])
    buffer.draw(10, 1, rng())
    assert len(buffer) == 10


def test_steps_far_apart_neither_overflow_nor_underflow():
    """exp(birth / tau) would overflow from birth = 709 tau on; the difference of ages still decides."""
    buffer = buffer_of([rollout(birth_step=10**6 + t, prompt_id=t) for t in range(3)], alpha=1.0, decay_tau_steps=1.0)
    weights = [math.exp(-2), math.exp(-1), 1.0]
    generator = rng(3)
    observed = Counter(tuple(r.prompt_id for r in buffer.draw(1, 10**6 + 3, generator)) for _ in range(6000))
    assert chi_square_p_value(observed, sequential_probabilities(weights, 1)) > P_BOUND


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 1000)), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.5, 0.6, 1.0]),
    st.sampled_from([1e-6, 1e-2]),
    st.floats(5, 1e4),
    st.integers(0, 500),
)
def test_time_invariant_keys_are_the_refreshed_priorities(items, alpha, epsilon, tau, later):
    advantages, births = (list(column) for column in zip(*items, strict=True))
    buffer = buffer_of([], alpha=alpha, epsilon=epsilon, decay_tau_steps=tau)
    keys = buffer.log_keys(np.array(advantages), np.array(births))
    expected = np.array(
        brute_force_weights(advantages, births, max(births) + later, alpha=alpha, epsilon=epsilon, tau=tau)
    )
    got = np.exp(keys - keys.max())
    total_variation = np.abs(got / got.sum() - expected / expected.sum()).sum() / 2
    assert total_variation < 1e-12


def test_the_keys_of_late_steps_are_still_exact():
    births = 10**6 + np.arange(0, 3000, 100)
    advantages = np.linspace(0.1, 2, len(births))
    keys = buffer_of([], alpha=0.6, decay_tau_steps=500.0).log_keys(advantages, births)
    expected = np.array(
        brute_force_weights(advantages, births.tolist(), int(births.max()), alpha=0.6, epsilon=1e-6, tau=500.0)
    )
    got = np.exp(keys - keys.max())
    assert np.abs(got / got.sum() - expected / expected.sum()).sum() / 2 < 1e-12


# --- rebuilding, refusing ---------------------------------------------------------------------------------------------


def test_a_buffer_rebuilt_from_its_rollouts_draws_the_same():
    generator = rng(5)
    buffer = buffer_of([], max_age_steps=6, capacity_rollouts=40, decay_tau_steps=3.0)
    for t in range(12):
        buffer.draw(7, t, generator)
        births = np.maximum(0, t - generator.integers(0, 3, 9))
        buffer.insert([rollout(int(b), float(generator.normal()), prompt_id=(t, i)) for i, b in enumerate(births)])
    rebuilt = ReplayBuffer(buffer.settings)
    rebuilt.insert(buffer.rollouts)
    for t in range(12, 25):
        drawn = [r.prompt_id for r in buffer.draw(10, t, rng(t))]
        assert drawn == [r.prompt_id for r in rebuilt.draw(10, t, rng(t))]
        assert len(rebuilt) == len(buffer)
        for one in (buffer, rebuilt):
            one.insert([rollout(t, 0.5, prompt_id=(t, "new"))])
    assert len(buffer) > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_advantage_that_is_no_number_is_refused_and_nothing_is_stored(bad):
    buffer = buffer_of([rollout()])
    with pytest.raises(ConfigError, match=f"prompt 'late' is {bad}"):
        buffer.insert([rollout(), rollout(advantage=bad, prompt_id="late")])
    assert len(buffer) == 1


# --- any sequence of operations, against a plain dict -----------------------------------------------------------------


class BufferAgainstDict(RuleBasedStateMachine):
    """Model: number -> (birth, advantage, bytes), in order of insertion."""

    @initialize(
        max_age=st.sampled_from([None, 1, 3]),
        count=st.sampled_from([1, 5, 12, 1000]),
        size=st.sampled_from([1, 40, 10**6]),
        epsilon=st.sampled_from([0.0, 1e-6]),
        alpha=st.sampled_from([0.0, 0.5]),
        tau=st.sampled_from([None, 2.0]),
    )
    def build(self, max_age, count, size, epsilon, alpha, tau):
        self.settings = Replay(
            max_age_steps=max_age,
            capacity_rollouts=count,
            capacity_bytes=size,
            epsilon=epsilon,
            alpha=alpha,
            decay_tau_steps=tau,
        )
        self.buffer = ReplayBuffer(self.settings)
        self.model: dict[int, tuple[int, float, int]] = {}
        self.step, self.next_id = 0, 0
        self.rng = np.random.default_rng(0)

    @rule(
        items=st.lists(
            st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, -0.1, 1.0, -3.0]), st.integers(0, 30)), max_size=6
        )
    )
    def insert(self, items):
        rollouts = []
        for age, advantage, nbytes in items:
            birth = max(0, self.step - age)
            self.model[self.next_id] = (birth, advantage, nbytes)
            rollouts.append(rollout(birth, advantage, nbytes, self.next_id))
            self.next_id += 1
        self.buffer.insert(rollouts)
        over_count = lambda: len(self.model) > self.settings.capacity_rollouts  # noqa: E731
        over_bytes = lambda: sum(n for _, _, n in self.model.values()) > self.settings.capacity_bytes  # noqa: E731
        while over_count() or over_bytes():
            del self.model[min(self.model, key=lambda i: (self.model[i][0], i))]

    @rule(steps=st.integers(0, 3))
    def move_on(self, steps):
        self.step += steps

    @rule(num_draws=st.integers(0, 15))
    def draw(self, num_draws):
        bound = math.inf if self.settings.max_age_steps is None else self.settings.max_age_steps
        self.model = {i: item for i, item in self.model.items() if self.step - item[0] <= bound}
        can_be_drawn = {i for i, (_, advantage, _) in self.model.items() if abs(advantage) + self.settings.epsilon > 0}
        drawn = self.buffer.draw(num_draws, self.step, self.rng)
        ids = [r.prompt_id for r in drawn]
        assert len(ids) == len(set(ids)) == min(num_draws, len(can_be_drawn))
        assert set(ids) <= can_be_drawn
        for one in drawn:
            assert (one.birth_step, one.advantage, one.nbytes) == self.model[one.prompt_id]

    @rule()
    def rebuild(self):
        rollouts = self.buffer.rollouts
        self.buffer = ReplayBuffer(self.settings)
        self.buffer.insert(rollouts)

    @invariant()
    def holds_what_the_model_holds(self):
        assert [r.prompt_id for r in self.buffer.rollouts] == list(self.model)
        assert len(self.buffer) == len(self.model)
        assert self.buffer.nbytes == sum(nbytes for _, _, nbytes in self.model.values())


TestBufferAgainstDict = BufferAgainstDict.TestCase
TestBufferAgainstDict.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
