"""Atomic loads, stores and a lock on words of shared memory that several processes use.

Numba has no atomics for the CPU, so these functions emit LLVM instructions.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..core.kernels import kernel
from ..core.layout import Array

WORDS = 16  # 128 bytes between words written by different ranks: CPUs prefetch cache lines in pairs


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, view, [index], wraparound=False)


@intrinsic
def load_acquire(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index_value = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = _element(context, builder, signature.args[0], args[0], index_value)
        return builder.load_atomic(pointer, "acquire", 8, typ=ir.IntType(64))

    return types.int64(array, index), generate


@intrinsic
def store_release(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index_value = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = _element(context, builder, signature.args[0], args[0], index_value)
        value = context.cast(builder, args[2], signature.args[2], types.int64)
        builder.store_atomic(value, pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def _exchange_if(typing_context: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index_value = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = _element(context, builder, signature.args[0], args[0], index_value)
        old = context.cast(builder, args[2], signature.args[2], types.int64)
        new = context.cast(builder, args[3], signature.args[3], types.int64)
        return builder.extract_value(builder.cmpxchg(pointer, old, new, "acq_rel", "acquire"), 1)

    return types.boolean(array, index, expected, value), generate


@kernel
def acquire(words: Array, at: int, spins: int) -> bool:
    """Try ``spins`` times to acquire the lock ``words[at]`` (0 is unlocked). Return whether it was acquired."""
    for _ in range(spins):
        # Read the lock before the atomic exchange, so that waiting ranks share the cache line.
        if load_acquire(words, at) == 0 and _exchange_if(words, at, 0, 1):  # type: ignore[call-arg]
            return True
    return False


_yield = types.ExternalFunction("sched_yield", types.int32())


@kernel
def lock(words: Array, at: int) -> None:
    """Acquire the lock ``words[at]``, yielding the core from time to time, because the lock's holder may need it."""
    while not acquire(words, at, 1000):
        _yield()


@kernel
def release(words: Array, at: int) -> None:
    """Release the lock ``words[at]``. All earlier writes are visible to its next holder."""
    store_release(words, at, 0)  # type: ignore[call-arg]


@kernel
def load(words: Array, at: int) -> int:
    """Return ``words[at]``; later reads see all writes that preceded the store of this value."""
    return load_acquire(words, at)  # type: ignore[call-arg,no-any-return]


@kernel
def store(words: Array, at: int, value: int) -> None:
    """Set ``words[at] = value`` after all earlier writes."""
    store_release(words, at, value)  # type: ignore[call-arg]
