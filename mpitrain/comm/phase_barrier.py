"""How far each rank of a node is: counters in shared memory, published and awaited in under a microsecond.

A rank publishes its phase, a number that only grows, after the memory that others may then read; others
wait until every rank has reached a phase. That is a barrier cut in two halves, between which a rank can
work. The store has release and the load acquire ordering, so that what was written before is seen after.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..core.kernels import kernel
from ..core.layout import Array
from .atomics import WORDS, load_acquire, store
from .backoff import Backoff
from .shared_memory import SharedArrays

_PHASE = 0
_LOSS = 1
_FLAGS = 2


@kernel
def _reached(words: Array, n: int, phase: int, spins: int) -> bool:
    for _ in range(spins):
        behind = False
        for rank in range(n):
            if load_acquire(words, rank * WORDS + _PHASE) < phase:  # type: ignore[call-arg]
                behind = True
                break
        if not behind:
            return True
    return False


class PhaseBarrier:
    """The phases, losses and flags of a node's ranks.

    Construction is collective over the node; afterwards every method is local, except that ``wait``
    returns only when the others have published.

    Attributes:
        losses: What each rank noted, shape (size,) float64.
    """

    def __init__(self, shared: SharedArrays, cores: int) -> None:
        self.rank, self.size = shared.node.rank, shared.node.size
        self._words = shared.allocate((self.size * WORDS,), np.int64)
        self.losses = self._words.view(np.float64)[_LOSS::WORDS]
        self._flags = self._words[_FLAGS::WORDS]
        self._at = self.rank * WORDS + _PHASE
        self._words[self.rank * WORDS : (self.rank + 1) * WORDS] = 0
        shared.node.Barrier()
        self._waiting = Backoff(oversubscribed=self.size > cores)

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
        store(self._words, self._at, phase)

    def reached(self, phase: int) -> bool:
        """Whether every rank has published ``phase``."""
        return _reached(self._words, self.size, phase, 1)  # type: ignore[no-any-return]

    def wait(self, phase: int, progress: Callable[[], object] | None = None) -> None:
        """Return when every rank has published ``phase``.

        ``progress`` is called now and then meanwhile, for MPI to move what is under way between nodes.

        Ends the process where its launcher has been killed.
        """
        self._waiting.until(lambda spins: _reached(self._words, self.size, phase, spins), progress)
