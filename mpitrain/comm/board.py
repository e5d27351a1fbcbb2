"""How far each rank of a node is: counters in shared memory, published and awaited in under a microsecond.

A rank publishes its phase, a number that only grows, after the memory that others may then read; others
wait until every rank has reached a phase. That is a barrier cut in two halves, between which a rank can
work. The store has release and the load acquire ordering, so that what was written before is seen after.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..kernels import kernel
from ..params import Array
from .shared import SharedArrays

_WORDS = 16  # 128 bytes a rank: neighbouring cache lines are fetched in pairs
_PHASE = 0
_LOSS = 1
_FLAGS = 2

_SPINS = 2000  # some 20 us before a waiting rank lets others run, where every rank has a core
_YIELDS = 200  # then so many times giving up the core before it sleeps
_SLEEP_S = 50e-6


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, view, [index], wraparound=False)


@intrinsic
def _load_acquire(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index_value = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = _element(context, builder, signature.args[0], args[0], index_value)
        return builder.load_atomic(pointer, "acquire", 8, typ=ir.IntType(64))

    return types.int64(array, index), generate


@intrinsic
def _store_release(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index_value = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = _element(context, builder, signature.args[0], args[0], index_value)
        value = context.cast(builder, args[2], signature.args[2], types.int64)
        builder.store_atomic(value, pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@kernel
def _publish(words: Array, at: int, phase: int) -> None:
    _store_release(words, at, phase)  # type: ignore[call-arg]


@kernel
def _reached(words: Array, n: int, phase: int, spins: int) -> bool:
    for _ in range(spins):
        behind = False
        for rank in range(n):
            if _load_acquire(words, rank * _WORDS + _PHASE) < phase:  # type: ignore[call-arg]
                behind = True
                break
        if not behind:
            return True
    return False


class Board:
    """The phases, losses and flags of a node's ranks.

    Construction is collective over the node; afterwards every method is local, except that ``wait``
    returns only when the others have published.

    Attributes:
        losses: What each rank noted, shape (size,) float64.
    """

    def __init__(self, shared: SharedArrays, cores: int) -> None:
        self.rank, self.size = shared.node.rank, shared.node.size
        self._words = shared.allocate((self.size * _WORDS,), np.int64)
        self.losses = self._words.view(np.float64)[_LOSS::_WORDS]
        self._flags = self._words[_FLAGS::_WORDS]
        self._at = self.rank * _WORDS + _PHASE
        self._words[self.rank * _WORDS : (self.rank + 1) * _WORDS] = 0
        shared.node.Barrier()
        self._launcher = os.getppid()
        # With more ranks than cores a spinning rank keeps the one that it waits for from running.
        self._spins = _SPINS if self.size <= cores else 1

    def note(self, loss: float, flags: int) -> None:
        """Write this rank's loss and flags; others see them once the next phase is published."""
        self.losses[self.rank] = loss
        self._flags[self.rank] = flags

    @property
    def flags(self) -> int:
        """The union of the ranks' flags."""
        return int(np.bitwise_or.reduce(self._flags))

    def publish(self, phase: int) -> None:
        """Say that this rank has reached ``phase``: all it wrote until now may be read."""
        _publish(self._words, self._at, phase)

    def reached(self, phase: int) -> bool:
        """Whether every rank has published ``phase``."""
        return _reached(self._words, self.size, phase, 1)  # type: ignore[no-any-return]

    def wait(self, phase: int, progress: Callable[[], object] | None = None) -> None:
        """Return when every rank has published ``phase``.

        ``progress`` is called now and then meanwhile, for MPI to move what is under way between nodes.

        Spins, then yields the core, then sleeps, so that a rank that waits for long takes nothing from
        those that it waits for. Ends the process where its launcher has been killed.
        """
        if _reached(self._words, self.size, phase, self._spins):
            return
        for _ in range(_YIELDS):
            if progress is not None:
                progress()
            os.sched_yield()
            if _reached(self._words, self.size, phase, 16):
                return
        while not _reached(self._words, self.size, phase, 16):
            if progress is not None:
                progress()
            if os.getppid() != self._launcher:
                # The launcher is gone, and with it whoever would tell that the others are. An orderly end needs both.
                os._exit(1)
            time.sleep(_SLEEP_S)
