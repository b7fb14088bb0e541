"""Priorities of a large buffer: many updated at once, some drawn without replacement, no pass over all of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollwise.errors import ConfigError
from rollwise.replay.sampling import draw_without_replacement

_LOG_WIDTH = 4
_WIDTH = (
    1 << _LOG_WIDTH
)  # slots in a block, blocks in a row: wider makes updates and scans dearer, narrower the first search
_RACE_UP_TO = 2048  # with no more live slots than this, or than 16 per draw, one pass over all of them is faster
_RACE_PER_DRAW = 16
_SEARCH_UP_TO = 65_536  # with more live slots, the sums of blocks are summed once more before they are searched
_MAX_SHIFT = 500.0  # a cached weight is at most exp(500); the sum of 10^80 of them is still a float64
_MIN_MASS = 1e-290  # below this, weights that were rounded to denormals or to 0 would bias the draw
_ROUNDS_BEFORE_THINNING = 3
_MAX_ROUNDS = 12


class PriorityIndex:
    """Log priorities by slot, drawn from without replacement in time that hardly grows with their number.

    A draw of k slots has exactly the distribution of drawing one after the other, each with probability
    proportional to what is left:

        P(i_1, ..., i_k) = prod_j  w_{i_j} / (W - w_{i_1} - ... - w_{i_{j-1}}),   w_i = exp(log_key_i)

    The keys must not depend on time: with `alpha * (log base + birth / tau)` they stand for priorities that decay
    with age, since the decay up to now, exp(-alpha now / tau), is a factor common to all. So nothing is refreshed as
    time passes. What is cached is `exp(log_key - offset)` and its sum over blocks of slots; the offset, a common
    factor too, is moved only when the largest key has left it far behind (about once in 500 tau / alpha steps).

    Few live slots: all of them race (`draw_without_replacement`). Many: a block is drawn by its sum, then a slot
    within it, with replacement, and repetitions are dropped in the order drawn, which leaves exactly the distribution
    above. Where a few slots hold nearly all of the weight, those drawn are taken out of the sums after 3 rounds;
    after 12, or where the weights left are too small for float64, the rest of the draw is a race.

    Draws are a function of the generator, `offset`, and which slot has which key, not of how it came about: an index
    built with the `offset` of another one and given its keys in the same slots draws the same.

    Time and memory for N slots, of which B are set and k drawn: `set` and `remove` O(B), `draw` O(N / 16 + k) where
    the first term is one sum over N / 16 numbers; 16.5 bytes a slot.

    Args:
        capacity: Slots to make room for now. Setting a slot beyond them makes more.
        offset: `offset` of an index to be rebuilt.

    Raises:
        ConfigError: If the capacity is negative or the offset not finite.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters
    97(5), 2006, for the race; Cormode et al., "Forward Decay", ICDE 2009, for keys that do not depend on time.
    """

    def __init__(self, capacity: int = 0, *, offset: float = 0.0) -> None:
        if capacity < 0:
            raise ConfigError(f"capacity is {capacity}; it must be at least 0")
        if not np.isfinite(offset):
            raise ConfigError(f"offset is {offset}; it must be finite")
        self._offset = float(offset)
        self._num_live = 0
        self._log_keys_N = np.empty(0)
        self._weights_N = np.empty(0)  # exp(log_key - offset)
        self._block_sums = np.empty(0)  # of _WIDTH weights each
        self.make_room(capacity)

    def __len__(self) -> int:
        """How many slots can be drawn."""
        return self._num_live

    @property
    def capacity(self) -> int:
        """Slots there is room for."""
        return len(self._log_keys_N)

    @property
    def offset(self) -> float:
        """What cached weights are relative to, in the unit of the keys (nats). Save it to draw the same later."""
        return self._offset

    def log_keys(self, slots: ArrayLike) -> NDArray[np.float64]:
        """Log keys of `slots` (B,), shape (B,); -inf where a slot cannot be drawn."""
        return self._log_keys_N[_as_slots(slots)]

    def set(self, slots: ArrayLike, log_keys: ArrayLike) -> None:
        """Insert or update.

        Args:
            slots: Different slots, integers from 0 on, shape (B,).
            log_keys: Their log keys in nats, shape (B,); -inf: never drawn, as if removed.

        Raises:
            ConfigError: If a slot is negative or repeats, a key is NaN or +inf, or the shapes differ. Nothing is set.
        """
        slots_B = _as_slots(slots)
        keys_B = np.asarray(log_keys, dtype=np.float64)
        if keys_B.shape != slots_B.shape:
            raise ConfigError(f"slots have the shape {slots_B.shape}, log_keys {keys_B.shape}; give one key per slot")
        if not len(slots_B):
            return
        largest = keys_B.max()
        if not largest < np.inf:
            bad = int(np.flatnonzero(~(keys_B < np.inf))[0])
            raise ConfigError(f"the log key of slot {slots_B[bad]} is {keys_B[bad]}; it must be a number or -inf")
        ordered_B = _different(slots_B)
        self.make_room(int(ordered_B[-1]) + 1)
        self._num_live += int(np.count_nonzero(keys_B > -np.inf))
        self._num_live -= int(np.count_nonzero(self._log_keys_N[slots_B] > -np.inf))
        self._log_keys_N[slots_B] = keys_B
        if largest - self._offset > _MAX_SHIFT:
            self._rebase()
        else:
            self._weights_N[slots_B] = np.exp(keys_B - self._offset)
            self._sum_blocks_of(ordered_B)

    def remove(self, slots: ArrayLike) -> None:
        """Make `slots` (B,) undrawable. They must differ; those that are not set are left as they are.

        Raises:
            ConfigError: If a slot is negative or repeats. Nothing is removed.
        """
        ordered_B = _different(_as_slots(slots))
        if len(ordered_B) and ordered_B[-1] >= self.capacity:
            ordered_B = ordered_B[ordered_B < self.capacity]
        if len(ordered_B):
            self._num_live -= int(np.count_nonzero(self._log_keys_N[ordered_B] > -np.inf))
            self._log_keys_N[ordered_B] = -np.inf
            self._weights_N[ordered_B] = 0.0
            self._sum_blocks_of(ordered_B)

    def draw(self, num_draws: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw different slots, one after the other. See the class for their distribution.

        Args:
            num_draws: How many, k. Fewer are drawn if fewer can be.
            rng: Source of all randomness. How much is taken from it depends on the keys.

        Returns:
            Slots in the order drawn, shape (min(k, len(self)),).
        """
        num_draws = min(num_draws, self._num_live)
        if num_draws <= 0:
            return np.zeros(0, dtype=np.int64)
        if self._num_live <= max(_RACE_UP_TO, _RACE_PER_DRAW * num_draws):
            return self._race(self._log_keys_N, num_draws, rng)
        return self._draw_from_blocks(num_draws, rng)

    def _race(self, log_keys_N: NDArray[np.float64], num_draws: int, rng: np.random.Generator) -> NDArray[np.int64]:
        live = np.flatnonzero(log_keys_N > -np.inf)
        return live[draw_without_replacement(log_keys_N[live], num_draws, rng)]

    def _draw_from_blocks(self, num_draws: int, rng: np.random.Generator) -> NDArray[np.int64]:
        drawn = np.zeros(0, dtype=np.int64)
        thinned: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        try:
            cumulative = self._cumulative_mass()
            if cumulative[-1] < _MIN_MASS:  # the large keys that set the offset have left
                self._rebase()
                cumulative = self._cumulative_mass()
            for rounds in range(1, _MAX_ROUNDS + 1):
                missing = num_draws - len(drawn)
                stream = self._draw_with_replacement(cumulative, missing + missing // 16 + 4, rng)
                drawn = _first_occurrences(np.concatenate([drawn, stream]))[:num_draws]
                if len(drawn) == num_draws:
                    return drawn
                if rounds >= _ROUNDS_BEFORE_THINNING:
                    thinned.append((drawn, self._weights_N[drawn]))
                    self._set_weights(drawn, np.zeros(len(drawn)))
                    cumulative = self._cumulative_mass()
                    if cumulative[-1] < _MIN_MASS:
                        break
        finally:
            for slots, weights in reversed(thinned):
                self._set_weights(slots, weights)
        left_N = self._log_keys_N.copy()
        left_N[drawn] = -np.inf
        return np.concatenate([drawn, self._race(left_N, num_draws - len(drawn), rng)])

    def _cumulative_mass(self) -> NDArray[np.float64]:
        """Of the blocks, or of rows of _WIDTH blocks where these are many."""
        is_large = self._num_live > _SEARCH_UP_TO
        return np.cumsum(_sum_rows(self._block_sums) if is_large else self._block_sums)

    def _draw_with_replacement(
        self, cumulative: NDArray[np.float64], num_draws: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Each by its mass: a row of blocks, a block of the row, a slot of the block. Or at once a block."""
        uniform_3B = rng.random((3, num_draws))
        blocks_B = np.searchsorted(cumulative, _below(uniform_3B[0] * cumulative[-1], cumulative[-1]), side="right")
        if self._num_live > _SEARCH_UP_TO:
            blocks_B = _pick(self._block_sums, blocks_B, uniform_3B[1])
        return _pick(self._weights_N, blocks_B, uniform_3B[2])

    def _set_weights(self, slots_B: NDArray[np.int64], weights_B: NDArray[np.float64]) -> None:
        self._weights_N[slots_B] = weights_B
        self._sum_blocks_of(np.sort(slots_B))

    def _sum_blocks_of(self, ordered_B: NDArray[np.int64]) -> None:
        """Sum anew the blocks of these slots: sums that were corrected by differences would drift."""
        blocks_B = ordered_B >> _LOG_WIDTH
        is_first_B = np.ones(len(blocks_B), dtype=bool)
        np.not_equal(blocks_B[1:], blocks_B[:-1], out=is_first_B[1:])
        blocks = blocks_B[is_first_B]
        self._block_sums[blocks] = _sum_rows(self._weights_N.reshape(-1, _WIDTH).take(blocks, axis=0))

    def _rebase(self) -> None:
        """Make the largest weight 1. Everything is computed from the keys: what was rounded to 0 comes back."""
        self._offset = float(self._log_keys_N.max())
        with np.errstate(over="ignore"):  # keys more than 1e308 apart
            np.subtract(self._log_keys_N, self._offset, out=self._weights_N)
        np.exp(self._weights_N, out=self._weights_N)
        self._block_sums = _sum_rows(self._weights_N)

    def make_room(self, num_slots: int) -> None:
        """Have room for at least so many slots, now and then for twice as many as before."""
        if num_slots <= self.capacity:
            return
        row = _WIDTH * _WIDTH
        added = -(-max(num_slots, 2 * self.capacity) // row) * row - self.capacity
        self._log_keys_N = np.concatenate([self._log_keys_N, np.full(added, -np.inf)])
        self._weights_N = np.concatenate([self._weights_N, np.zeros(added)])
        self._block_sums = np.concatenate([self._block_sums, np.zeros(added // _WIDTH)])


def _as_slots(slots: ArrayLike) -> NDArray[np.int64]:
    slots_B = np.asarray(slots)
    if slots_B.ndim != 1 or (slots_B.dtype.kind not in "iu" and len(slots_B)):
        raise ConfigError(f"slots have the shape {slots_B.shape} and dtype {slots_B.dtype}; give a list of integers")
    return slots_B.astype(np.int64, copy=False)


def _different(slots_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slots in ascending order, if they are different and not negative."""
    ordered_B = slots_B
    if not (slots_B[1:] > slots_B[:-1]).all():
        ordered_B = np.sort(slots_B)
        repeats_B = ordered_B[1:] == ordered_B[:-1]
        if repeats_B.any():
            raise ConfigError(f"slot {ordered_B[:-1][repeats_B][0]} is given more than once; give each slot once")
    if len(ordered_B) and ordered_B[0] < 0:
        raise ConfigError(f"slot {ordered_B[0]} is negative; slots count from 0")
    return ordered_B


def _first_occurrences(slots_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slots without repetitions, in the order in which they come first."""
    ordered_B = np.sort(slots_B)
    if not (ordered_B[1:] == ordered_B[:-1]).any():
        return slots_B
    return slots_B[np.sort(np.unique(slots_B, return_index=True)[1])]


def _sum_rows(weights_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of _WIDTH neighbours each. A row's sum must not depend on which others are summed with it (see tests)."""
    return np.asarray(np.einsum("bk->b", weights_N.reshape(-1, _WIDTH)))


def _pick(
    weights_N: NDArray[np.float64], rows_B: NDArray[np.int64], uniform_B: NDArray[np.float64]
) -> NDArray[np.int64]:
    """A position within each of these rows, with probability proportional to its weight; never one of weight 0."""
    cumulative_KB = np.ascontiguousarray(weights_N.reshape(-1, _WIDTH).take(rows_B, axis=0).T)
    for before_B, column_B in pairwise(cumulative_KB):  # faster than cumsum, whose cost is by row
        np.add(before_B, column_B, out=column_B)
    targets_B = _below(uniform_B * cumulative_KB[-1], cumulative_KB[-1])
    return np.asarray(rows_B * _WIDTH + (cumulative_KB <= targets_B).sum(axis=0))


def _below(targets_B: NDArray[np.float64], bound: NDArray[np.float64] | np.float64) -> NDArray[np.float64]:
    """`targets_B`, where rounding up to the bound itself (beyond the last weight) is undone."""
    return np.minimum(targets_B, np.nextafter(bound, 0))
