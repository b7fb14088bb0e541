"""Advantages against values worked out by hand, and against a slow reference that goes group by group."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise import ConfigError, Rollout
from rollwise.advantage import freeze_advantages, group_advantages, success_rate, td_errors, without_baseline
from rollwise.rollout import Group

SCALES = ("group", "batch", "none")


def advantages(rewards, sizes, **options):
    return group_advantages(rewards, sizes, **({"epsilon": 0.0} | options)).advantages_B


def slow_reference(groups, scale, ddof, epsilon):
    """Exact arithmetic from the standard library, one group after the other."""
    std = statistics.stdev if ddof else statistics.pstdev
    every = [r for group in groups for r in group if math.isfinite(r)]
    result = []
    for group in groups:
        scored = [r for r in group if math.isfinite(r)]
        varies = len(set(scored)) > 1
        for r in group:
            if not math.isfinite(r):
                result.append(math.nan)
            elif not varies:
                result.append(0.0)
            else:
                spread = {"group": lambda s=scored: std(s), "batch": lambda: std(every), "none": lambda: None}[scale]()
                centred = r - statistics.fmean(scored)
                result.append(centred if spread is None else centred / (spread + epsilon))
    return result


# --- by hand ----------------------------------------------------------------------------------------------------------

ROOT_3, ROOT_HALF = 1.7320508075688772, 0.7071067811865476
BY_HAND = {
    # groups 0 0 0 1 (mean 1/4) and 2 4 (mean 3); all six: mean 7/6, sum of squares 77/6
    ("group", 0): [-1 / ROOT_3, -1 / ROOT_3, -1 / ROOT_3, ROOT_3, -1.0, 1.0],
    ("group", 1): [-0.5, -0.5, -0.5, 1.5, -ROOT_HALF, ROOT_HALF],
    ("batch", 0): [x / 1.4624940645653537 for x in (-0.25, -0.25, -0.25, 0.75, -1, 1)],
    ("batch", 1): [x / 1.6020819787597222 for x in (-0.25, -0.25, -0.25, 0.75, -1, 1)],
    ("none", 0): [-0.25, -0.25, -0.25, 0.75, -1, 1],
    ("none", 1): [-0.25, -0.25, -0.25, 0.75, -1, 1],
}


@pytest.mark.parametrize(("scale", "ddof"), BY_HAND)
def test_by_hand(scale, ddof):
    result = group_advantages([0, 0, 0, 1, 2, 4], [4, 2], scale=scale, ddof=ddof, epsilon=0.0)
    assert result.advantages_B == pytest.approx(BY_HAND[scale, ddof], rel=1e-12)
    assert result.means_P.tolist() == [0.25, 3.0]
    assert result.stds_P == pytest.approx([0.4330127018922193, 1.0] if ddof == 0 else [0.5, 2 * ROOT_HALF], rel=1e-12)
    assert result.has_variance_P.tolist() == [True, True]


def test_the_defaults_are_those_of_torch_std_and_trl():
    """0 and 1: sample std 0.70711; TRL divides by std + 1e-4."""
    assert group_advantages([0, 1], [2]).advantages_B == pytest.approx(np.array([-0.5, 0.5]) / (ROOT_HALF + 1e-4))


def test_epsilon_is_added_to_the_std_not_to_the_variance():
    assert advantages([0, 1], [2], ddof=0, epsilon=0.5).tolist() == [-0.5, 0.5]
    assert advantages([0, 1], [2], ddof=0, epsilon=0.5, scale="batch").tolist() == [-0.5, 0.5]
    assert advantages([0, 1], [2], ddof=0, epsilon=0.5, scale="none").tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 16, 64])
def test_binary_rewards_follow_the_closed_form_for_every_number_of_successes(size):
    for k in range(size + 1):
        result = advantages([1.0] * k + [0.0] * (size - k), [size], ddof=0)
        if k in (0, size):
            assert result.tolist() == [0.0] * size
        else:
            assert result[:k] == pytest.approx(math.sqrt((size - k) / k), rel=1e-12)
            assert result[k:] == pytest.approx(-math.sqrt(k / (size - k)), rel=1e-12)


# --- groups without variance ------------------------------------------------------------------------------------------

AWKWARD = [0.1, 0.3, 1 / 3, float(np.float32(0.1)), -0.7, 1e-300, 1e15 + 0.3, 123456.789]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_equal_rewards_give_exactly_zero_whatever_their_floating_point_std(scale, ddof, epsilon):
    for value in AWKWARD:
        for size in (1, 2, 3, 6, 7, 11, 64):
            result = group_advantages([value] * size, [size], scale=scale, ddof=ddof, epsilon=epsilon)
            assert result.advantages_B.tolist() == [0.0] * size
            assert result.has_variance_P.tolist() == [False]
            assert result.stds_P.tolist() == [0.0]
            assert result.means_P.tolist() == [value]


def test_the_awkward_values_would_fool_a_test_on_the_std():
    assert any(np.std([value] * size) > 0 for value in AWKWARD for size in (3, 6, 7, 11))


@pytest.mark.parametrize("scale", SCALES)
def test_an_equal_group_stays_at_zero_beside_one_with_variance(scale):
    result = group_advantages([0.1] * 3 + [0.0, 5.0] + [0.3] * 6, [3, 2, 6], scale=scale)
    assert result.has_variance_P.tolist() == [False, True, False]
    assert result.advantages_B[:3].tolist() == [0.0] * 3
    assert result.advantages_B[5:].tolist() == [0.0] * 6
    assert result.advantages_B[3] < 0 < result.advantages_B[4]


def test_rewards_in_float32_are_equal_if_they_are_equal():
    result = group_advantages(np.full(7, 0.1, dtype=np.float32), [7])
    assert not result.has_variance_P[0]
    assert result.advantages_B.tolist() == [0.0] * 7


def test_the_smallest_difference_is_variance():
    result = group_advantages([0.1, np.nextafter(0.1, 1)], [2], epsilon=1e-4)
    assert result.has_variance_P.tolist() == [True]
    assert np.isfinite(result.advantages_B).all()


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_of_one_has_advantage_zero(scale):
    result = group_advantages([5.0, 1.0, 0.0], [1, 2], scale=scale)
    assert result.advantages_B[0] == 0.0
    assert result.has_variance_P.tolist() == [False, True]
    assert result.stds_P[0] == 0.0


# --- unscored ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("ddof", [0, 1])
def test_an_unscored_rollout_changes_nothing_for_the_others(bad, scale, ddof):
    without = group_advantages([0, 0, 1, 2, 4], [3, 2], scale=scale, ddof=ddof)
    result = group_advantages([0, bad, 0, 1, 2, 4, bad], [4, 3], scale=scale, ddof=ddof)
    assert np.isnan(result.advantages_B).tolist() == [False, True, False, False, False, False, True]
    assert result.advantages_B[[0, 2, 3, 4, 5]] == pytest.approx(without.advantages_B, rel=1e-12)
    assert result.means_P.tolist() == without.means_P.tolist()
    assert result.stds_P == pytest.approx(without.stds_P, rel=1e-12)


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_without_any_score(scale):
    result = group_advantages([math.nan, math.inf, 0, 1], [2, 2], scale=scale)
    assert np.isnan(result.advantages_B).tolist() == [True, True, False, False]
    assert math.isnan(result.means_P[0])
    assert result.stds_P[0] == 0.0
    assert result.has_variance_P.tolist() == [False, True]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_nothing_scored_at_all(scale, epsilon):
    result = group_advantages([math.nan] * 4, [2, 2], scale=scale, epsilon=epsilon)
    assert np.isnan(result.advantages_B).all()
    assert not result.has_variance_P.any()


def test_one_score_in_a_group_is_no_variance():
    result = group_advantages([math.nan, 3.0, math.nan], [3])
    assert result.has_variance_P.tolist() == [False]
    assert result.advantages_B[1] == 0.0
    assert result.means_P.tolist() == [3.0]


# --- shapes and settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_nothing_in_nothing_out(scale):
    result = group_advantages([], [], scale=scale)
    for values in (result.advantages_B, result.means_P, result.stds_P, result.has_variance_P):
        assert values.shape == (0,)


@pytest.mark.parametrize("sizes", [[2], [2, 2], [3, 0], [4, -1], [], [1, 1]])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ConfigError, match="for 3 rewards"):
        group_advantages([0, 1, 2], sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "rank"}, "'rank'"),
        ({"ddof": 2}, "ddof is 2"),
        ({"epsilon": -1e-4}, "-0.0001"),
        ({"epsilon": math.nan}, "nan"),
    ],
)
def test_settings_out_of_bounds_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        group_advantages([0, 1], [2], **options)


# --- properties -------------------------------------------------------------------------------------------------------

rewards = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(-100, 100, width=32),
    st.sampled_from([0.1, 0.2, 1 / 3, math.nan, math.inf, -math.inf]),
)
grouped = st.lists(st.lists(rewards, min_size=1, max_size=9), max_size=6)
scored_grouped = st.lists(st.lists(st.integers(-50, 50).map(lambda n: n / 4), min_size=1, max_size=9), max_size=6)


@settings(max_examples=200, deadline=None)
@given(grouped, st.sampled_from(SCALES), st.sampled_from([0, 1]), st.sampled_from([1e-4, 1e-2]))
def test_against_the_slow_reference(groups, scale, ddof, epsilon):
    result = group_advantages(
        [r for group in groups for r in group], [len(g) for g in groups], scale=scale, ddof=ddof, epsilon=epsilon
    )
    expected = slow_reference(groups, scale, ddof, epsilon)
    assert result.advantages_B.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-9, nan_ok=True)
    for varies, group in zip(result.has_variance_P, groups, strict=True):
        assert varies == (len({r for r in group if math.isfinite(r)}) > 1)


@settings(max_examples=100, deadline=None)
@given(grouped, st.sampled_from(SCALES), st.sampled_from([0, 1]))
def test_the_advantages_of_a_group_sum_to_zero(groups, scale, ddof):
    sizes = [len(group) for group in groups]
    result = advantages([r for group in groups for r in group], sizes, scale=scale, ddof=ddof, epsilon=1e-4)
    for part in np.split(result, np.cumsum(sizes)[:-1]) if sizes else []:
        scored = part[~np.isnan(part)]
        assert abs(scored.sum()) <= 1e-9 * max(1.0, np.abs(scored).sum())


@settings(max_examples=100, deadline=None)
@given(scored_grouped, st.sampled_from(SCALES), st.integers(-1000, 1000))
def test_a_shift_of_one_groups_rewards_changes_nothing_unless_the_batch_is_the_scale(groups, scale, shift):
    sizes = [len(group) for group in groups]
    before = advantages([r for group in groups for r in group], sizes, scale=scale, epsilon=1e-4)
    if scale != "batch":
        moved = [[r + shift * (1 + p) for r in group] for p, group in enumerate(groups)]
    else:
        moved = [[r + shift for r in group] for group in groups]
    after = advantages([r for group in moved for r in group], sizes, scale=scale, epsilon=1e-4)
    assert after == pytest.approx(before, rel=1e-6, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(scored_grouped, st.sampled_from(["group", "batch"]), st.sampled_from([0.125, 3.0, 1000.0]))
def test_with_epsilon_zero_the_unit_of_the_reward_does_not_matter(groups, scale, factor):
    sizes = [len(group) for group in groups]
    flat = np.array([r for group in groups for r in group])
    before = advantages(flat, sizes, scale=scale)
    assert advantages(flat * factor, sizes, scale=scale) == pytest.approx(before, rel=1e-9, abs=1e-12)


# --- success rates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "threshold", "expected"),
    [
        ([1, 0, 0, 1], 1.0, 0.5),
        ([1.0, 0.999, 2.0, -1.0], 1.0, 0.5),  # at the threshold is a success
        ([0.5, 0.4], 0.5, 0.5),
        ([1, math.nan, math.inf, -math.inf], 1.0, 1.0),  # infinite is unscored, not a success
        ([0, None, math.nan], 1.0, 0.0),
        ([0] * 7 + [1] * 3, 1.0, 0.3),
    ],
)
def test_success_rate(rewards, threshold, expected):
    assert success_rate(rewards, threshold) == expected


def test_by_default_a_reward_of_1_is_a_success():
    assert success_rate([0.99, 1.0, 1.5, 2.0]) == 0.75


@pytest.mark.parametrize("rewards", [[], [math.nan, math.inf, None]])
def test_the_success_rate_of_nothing_scored_is_unknown(rewards):
    assert math.isnan(success_rate(rewards))


def test_td_errors_by_hand_and_their_sum_where_nothing_is_discounted():
    rewards, values = [0.0, 0.0, 1.0], [0.2, 0.5, 0.9]
    assert td_errors(rewards, values, gamma=0.5) == pytest.approx([0.25 - 0.2, 0.45 - 0.5, 1.0 - 0.9])
    assert td_errors(rewards, values).sum() == pytest.approx(1.0 - 0.2)


def test_what_becomes_of_each_rollout_of_a_group():
    mixed = [
        Rollout(0, 1.0, num_tokens=2),
        Rollout(0, 0.0, num_tokens=2, num_loss_tokens=0),
        Rollout(0, math.nan, num_tokens=2),
    ]
    equal = [Rollout(1, 1.0, num_tokens=2, num_loss_tokens=0), Rollout(1, 1.0, num_tokens=2)]
    outcomes = freeze_advantages([Group(0, 0, mixed), Group(1, 0, equal)], scale="none")
    assert outcomes == {
        "trained": mixed[:1],
        "truncated": mixed[1:2],
        "unscored": mixed[2:],
        "zero_variance": equal,
    }
    assert [rollout.advantage for rollout in (*mixed[:2], *equal)] == [0.5, -0.5, 0.0, 0.0]
    assert math.isnan(mixed[2].advantage)
    assert [rollout.group_mean for rollout in mixed] == [0.5, 0.5, 0.5]
    assert [rollout.group_std for rollout in mixed] == pytest.approx([math.sqrt(0.5)] * 3)


def test_with_a_critic_only_unscored_and_masked_rollouts_are_left_out():
    equal = [Rollout(0, 1.0, num_tokens=2), Rollout(0, 1.0, num_tokens=2)]
    others = [Rollout(1, math.nan, num_tokens=2), Rollout(1, 0.0, num_tokens=2, num_loss_tokens=0)]
    outcomes = without_baseline([Group(0, 0, equal), Group(1, 0, others)])
    assert outcomes == {"trained": equal, "unscored": others[:1], "truncated": others[1:]}
    assert all(rollout.advantage == 0.0 for rollout in equal)
