"""The order of examples in each epoch, as a function that needs no memory.

The stream of examples is endless: position p is in epoch p // n, at index p % n of that epoch's order. The order is a
bijection of [0, n): a Feistel network over the smallest domain 2^(2k) >= n. The network is applied again while its
result is not below n (cycle walking; Black and Rogaway, Ciphers with arbitrary finite domains, 2002, section 3).
"""

from __future__ import annotations

import numpy as np

from ..core.kernels import kernel
from ..core.layout import Array

MIXED_BLOCKS = 8
_ROUNDS = 10  # number of rounds; with fewer, the order of fewer than ten examples is visibly not uniform
# Multipliers and shifts of the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


@kernel
def _mix(x: int) -> int:
    x = (x ^ (x >> _S30)) * _MIX1
    x = (x ^ (x >> _S27)) * _MIX2
    return x ^ (x >> _S31)  # type: ignore[no-any-return]


@kernel
def _bijection(value: int, n: int, half_bits: int, key: int) -> int:
    """Map ``value`` in [0, n) to [0, n), one to one."""
    if n == 1:
        return 0
    half, mask = np.uint64(half_bits), (np.uint64(1) << np.uint64(half_bits)) - np.uint64(1)
    limit = np.uint64(n)
    x = np.uint64(value)
    while True:
        left, right = x >> half, x & mask
        for r in range(_ROUNDS):
            mixed = _mix(right + key + np.uint64(r + 1) * _GOLDEN) & mask
            left, right = right, left ^ mixed
        x = (left << half) | right
        if x < limit:
            return np.int64(x)  # type: ignore[no-any-return]


@kernel
def _bijections(first: int, n: int, half_bits: int, key: int, out: Array) -> None:
    """Set out[i] = _bijection(first + i, ...), all elements round by round: such loops vectorize."""
    half, mask = np.uint64(half_bits), (np.uint64(1) << np.uint64(half_bits)) - np.uint64(1)
    limit, count = np.uint64(n), out.size
    left, right, places = np.empty(count, np.uint64), np.empty(count, np.uint64), np.arange(count)
    for i in range(count):
        left[i], right[i] = np.uint64(first + i) >> half, np.uint64(first + i) & mask
    while count > 0:
        for r in range(_ROUNDS):
            round_key = key + np.uint64(r + 1) * _GOLDEN
            for i in range(count):
                mixed = left[i] ^ (_mix(right[i] + round_key) & mask)
                left[i] = right[i]
                right[i] = mixed
        kept = 0
        for i in range(count):
            x = (left[i] << half) | right[i]
            if x < limit:
                out[places[i]] = np.int64(x)
            else:
                left[kept], right[kept], places[kept] = left[i], right[i], places[i]
                kept += 1
        count = kept


@kernel
def _half_bits(n: int) -> int:
    bits = 1
    while (1 << (2 * bits)) < n:
        bits += 1
    return bits


@kernel
def _order(start: int, n: int, block: int, seed: int, out: Array) -> None:
    blocks = n // block  # full blocks; remaining examples are permuted among themselves at the end of the epoch
    rest = n - blocks * block
    bits_block, bits_rest = _half_bits(blocks), _half_bits(rest)
    if block == n and n > 1:  # one block: all positions of an epoch have the same key
        done, bits = 0, _half_bits(n)
        while done < out.size:
            epoch, place = (start + done) // n, (start + done) % n
            key = _mix(_mix(np.uint64(seed) + _GOLDEN) + np.uint64(epoch) * _GOLDEN)
            count = min(out.size - done, n - place)
            _bijections(place, n, bits, _mix(key + np.uint64(1)), out[done : done + count])
            done += count
        return
    for i in range(out.size):
        epoch, place = (start + i) // n, (start + i) % n
        key = _mix(_mix(np.uint64(seed) + _GOLDEN) + np.uint64(epoch) * _GOLDEN)
        if place >= blocks * block:
            out[i] = blocks * block + _bijection(place - blocks * block, rest, bits_rest, _mix(key))
            continue
        group = place // (MIXED_BLOCKS * block)
        first = group * MIXED_BLOCKS  # first block of this group, in the epoch's order of blocks
        mixed = min(MIXED_BLOCKS, blocks - first) * block
        at = _bijection(place - first * block, mixed, _half_bits(mixed), _mix(key + np.uint64(group + 1)))
        which = _bijection(first + at // block, blocks, bits_block, key)
        out[i] = which * block + at % block


def order(start: int, count: int, n: int, seed: int, block: int | None = None) -> Array:
    """Return the indices of the examples at stream positions [start, start + count), shape (count,), int64.

    Args:
        n: Number of examples in the data set.
        seed: Determines the order, together with the epoch.
        block: Number of examples in a block of the files. Blocks are permuted, and then the examples within each group
            of ``MIXED_BLOCKS`` consecutive blocks, so that few blocks are needed at a time. None permutes all examples.
    """
    out = np.empty(count, np.int64)
    _order(start, n, n if block is None else block, seed, out)
    return out
