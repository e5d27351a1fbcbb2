"""Orders of examples: which example is at each position of the endless stream.

An order is a function of the seed and the position alone. Therefore no state is needed to give the same order on any
number of ranks and after a resume.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ..core.layout import Array
from ..errors import DataError
from .permutation import order

__all__ = ["GroupedByLength", "Order", "OwnOrder", "Sequential", "Shuffled", "Streams", "Weighted"]


class Order(Protocol):
    """Maps positions of the endless stream to examples. Two equal orders have the same ``repr``."""

    def length(self, count: int) -> int:
        """Return the number of positions in an epoch of ``count`` examples."""

    def indices(self, position: int, count: int, n: int, seed: int, block: int | None = None) -> Array:
        """Return the examples at [position, position + count), shape (count,), int64.

        Args:
            n: Number of positions in an epoch.
            block: Number of examples that are read from a file at a time; None if single examples are read as quickly.
        """


class _EachOnce:
    def length(self, count: int) -> int:
        return count

    def __repr__(self) -> str:
        return type(self).__name__


class Shuffled(_EachOnce):
    """Every example once in each epoch, in a different order in each epoch; see ``permutation.order`` for blocks."""

    def indices(self, position: int, count: int, n: int, seed: int, block: int | None = None) -> Array:
        return order(position, count, n, seed, block)


class Sequential(_EachOnce):
    """Every example once in each epoch, in the order of their indices."""

    def indices(self, position: int, count: int, n: int, seed: int, block: int | None = None) -> Array:
        return np.arange(position, position + count) % n


class Weighted:
    """Examples drawn with replacement, each with a probability in proportion to its weight.

    An epoch has as many positions as there are examples, as with torch's ``WeightedRandomSampler`` if its
    ``num_samples`` is the number of examples.

    Args:
        weights: Shape (number of examples,), not negative, with a positive sum.

    Raises:
        DataError: The weights are not valid.
    """

    def __init__(self, weights: Sequence[float] | Array) -> None:
        values = np.asarray(weights, np.float64)
        if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
            raise DataError(
                "Weighted needs one weight per example; weights must be finite, not negative, and not all zero"
            )
        self._sums = np.cumsum(values)

    def length(self, count: int) -> int:
        if len(self._sums) != count:
            raise DataError(f"Weighted has {len(self._sums):,} weights, but there are {count:,} examples")
        return count

    def indices(self, position: int, count: int, n: int, seed: int, block: int | None = None) -> Array:
        drawn = _uniform(seed, np.arange(position, position + count)) * self._sums[-1]
        # Rounding may give the sum itself, whose place is after the last example.
        return np.minimum(np.searchsorted(self._sums, drawn, side="right"), n - 1)

    def __repr__(self) -> str:
        return f"Weighted({_digest(self._sums)})"


class GroupedByLength(_EachOnce):
    """Every example once in each epoch; neighbours have similar lengths, so that a padded batch has little padding.

    Examples are shuffled; then each group of ``group`` positions is sorted by length, longest first.

    Args:
        lengths: Shape (number of examples,).
        group: Number of positions in a group; a good value is 50 batches of all workers.
    """

    def __init__(self, lengths: Sequence[int] | Array, group: int) -> None:
        self._lengths, self._group = np.asarray(lengths), group
        if self._lengths.ndim != 1 or group < 1:
            raise DataError("GroupedByLength needs one length per example, and group must be at least 1")
        self._sorted: tuple[tuple[int, int, int], Array] | None = None

    def length(self, count: int) -> int:
        if len(self._lengths) != count:
            raise DataError(f"GroupedByLength has {len(self._lengths):,} lengths, but there are {count:,} examples")
        return count

    def indices(self, position: int, count: int, n: int, seed: int, block: int | None = None) -> Array:
        parts, end = [], position + count
        while position < end:
            start = position // n * n + position % n // self._group * self._group
            stop = min(start + self._group, (position // n + 1) * n)
            parts.append(self._group_at(start, stop, n, seed)[position - start : end - start])
            position = stop
        return np.concatenate(parts)

    def _group_at(self, start: int, stop: int, n: int, seed: int) -> Array:
        key = start, n, seed
        if self._sorted is None or self._sorted[0] != key:  # most consecutive batches are in one group
            shuffled = order(start, stop - start, n, seed)
            self._sorted = key, shuffled[np.argsort(-self._lengths[shuffled], kind="stable")]
        return self._sorted[1]

    def __repr__(self) -> str:
        return f"GroupedByLength({_digest(self._lengths)}, {self._group})"


class Streams:
    """Consecutive examples side by side, for recurrent models whose state passes from batch to batch.

    The examples are cut into ``count`` streams of equal length; examples left over at the end are not used. At each
    step of ``sync``, place i of the joined batch of all workers continues stream i.

    Args:
        count: Number of streams: the batch size times the number of workers.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise DataError(f"Streams got {count}: must be at least 1")
        self._count = count

    def check_step(self, examples: int) -> None:
        """Check that a step of all workers uses one example of each stream.

        Raises:
            DataError: The step has another number of examples.
        """
        if examples != self._count:
            raise DataError(
                f"Streams({self._count}) needs steps of {self._count} examples, but a step of all workers has "
                f"{examples}; use Streams({examples}), or change the batch size or the number of workers"
            )

    def length(self, count: int) -> int:
        if count < self._count:
            raise DataError(f"Streams({self._count}) needs at least {self._count} examples, but there are {count:,}")
        return count - count % self._count

    def indices(self, position: int, count: int, n: int, seed: int, block: int | None = None) -> Array:
        places = np.arange(position, position + count) % n
        return places % self._count * (n // self._count) + places // self._count

    def __repr__(self) -> str:
        return f"Streams({self._count})"


class OwnOrder:
    """An order defined by a user's function.

    Args:
        function: Takes the seed and a position of the endless stream, and returns the index of an example.
    """

    def __init__(self, function: Callable[[int, int], int]) -> None:
        self._function = function

    def length(self, count: int) -> int:
        return count

    def indices(self, position: int, count: int, n: int, seed: int, block: int | None = None) -> Array:
        return np.array([self._index(seed, place, n) for place in range(position, position + count)], np.int64)

    def _index(self, seed: int, position: int, n: int) -> int:
        try:
            index = self._function(seed, position)
        except Exception as error:
            raise DataError(f"the order {self!r} at position {position}: {type(error).__name__}: {error}") from error
        if not isinstance(index, numbers.Integral) or isinstance(index, bool) or not 0 <= index < n:
            raise DataError(f"the order {self!r} returned {index!r}: must be an integer from 0 to {n - 1}")
        return int(index)

    def __repr__(self) -> str:
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        code = getattr(self._function, "__code__", None)
        return name if code is None else f"{name}, {hashlib.sha256(code.co_code).hexdigest()[:8]}"


def _uniform(seed: int, positions: Array) -> Array:
    """Return numbers in [0, 1) that depend on seed and position, by the finalizer of SplitMix64."""
    mixed = positions.astype(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)) * 2:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)) * 2.0**-53


def _digest(values: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:8]
