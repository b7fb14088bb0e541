"""Which prompts are believed to be alike."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollwise.allocation.buckets import buckets_of


def test_texts_and_few_numbers_are_categories():
    assert buckets_of(["b", "a", "b", "c"]).tolist() == [1, 0, 1, 2]
    assert buckets_of([3, 1, 3, 2]).tolist() == [2, 0, 2, 1]
    assert buckets_of(["x", None, 3]).tolist() == [2, 1, 0]  # whatever it is, as text


def test_many_numbers_are_cut_at_their_quantiles():
    values = np.random.default_rng(0).lognormal(size=4000)
    buckets = buckets_of(values.tolist())
    assert np.bincount(buckets).tolist() == [500] * 8
    assert (np.diff(buckets[np.argsort(values)]) >= 0).all()


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.integers(1, 12))
def test_no_bucket_is_empty_and_equal_values_share_one(values, num_quantiles):
    buckets = buckets_of(values, num_quantiles)
    assert sorted(set(buckets.tolist())) == list(range(buckets.max() + 1))
    by_value = {}
    for value, bucket in zip(values, buckets.tolist(), strict=True):
        assert by_value.setdefault(value, bucket) == bucket
