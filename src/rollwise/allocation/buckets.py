"""Buckets of prompts that are believed to be alike, for belief allocation."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Numbers of more different values than this are cut into quantiles.
_MOST_CATEGORIES = 64


def buckets_of(values: Sequence[Any], num_quantiles: int = 8) -> NDArray[np.int64]:
    """Buckets from one value per prompt: a level, a source, a measured success rate, a length.

    Texts, and numbers of at most 64 different values, are categories: one bucket each. Other numbers are cut at their
    quantiles into at most `num_quantiles` buckets of about the same size.

    Args:
        values: One per prompt, shape (P,).
        num_quantiles: The most buckets that numbers are cut into.

    Returns:
        A bucket from 0 on per prompt, shape (P,); none is empty.
    """
    is_number = all(isinstance(value, Real) for value in values)
    keys = list(values) if is_number else [str(value) for value in values]
    distinct, buckets = np.unique(np.array(keys), return_inverse=True)
    if not is_number or len(distinct) <= _MOST_CATEGORIES:
        return buckets.astype(np.int64)
    numbers = np.asarray(values, dtype=np.float64)
    edges = np.quantile(numbers, np.arange(1, num_quantiles) / num_quantiles)
    return np.unique(np.searchsorted(edges, numbers, side="right"), return_inverse=True)[1].astype(np.int64)
