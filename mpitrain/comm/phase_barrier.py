"""A split barrier for the ranks of a node, on counters in shared memory; takes less than a microsecond.

A rank publishes its phase, a number that only grows, after it has written memory. Other ranks may then read this
memory. Other ranks wait until every rank has reached a phase. Between publishing and waiting a rank can do other work.
Stores have release and loads acquire ordering, so that all earlier writes are visible.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

from ..core.kernels import kernel
from ..core.layout import Array
from .atomics import WORDS, load_acquire, store
from .backoff import Backoff
from .mpi import MPI
from .shared_memory import SharedArrays

_PHASE, _LOSS, _FLAGS = range(3)
_ACTIONS = 3  # actions of phases with an even and an odd number


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


@kernel
def _any_reached(words: Array, n: int, phase: int) -> bool:
    for rank in range(n):
        if load_acquire(words, rank * WORDS + _PHASE) >= phase:  # type: ignore[call-arg]
            return True
    return False


class PhaseBarrier:
    """Phases, losses and flags of a node's ranks.

    Construction is collective over the node. Afterwards every method is local, except that ``wait`` returns only after
    the other ranks have published.

    Attributes:
        losses: Last loss set by each rank, shape (size,), float64.
        phase: The last phase of this rank, if the barrier's methods number the phases, and not the callers of
            ``publish``.
        waited_s: Seconds that this rank has waited for others, in ``wait``.
    """

    def __init__(self, shared: SharedArrays, cores: int) -> None:
        self.rank, self.size = shared.node.rank, shared.node.size
        self._words = shared.allocate((self.size * WORDS,), np.int64)
        self.losses = self._words.view(np.float64)[_LOSS::WORDS]
        self._flags = self._words[_FLAGS::WORDS]
        self._at, self.phase, self.waited_s = self.rank * WORDS + _PHASE, 0, 0.0
        self._words[self.rank * WORDS : (self.rank + 1) * WORDS] = 0
        self._ranks: list[int] = shared.node.allgather(MPI.COMM_WORLD.rank)
        self._waiting = Backoff(oversubscribed=self.size > cores)

    def set_status(self, loss: float, flags: int) -> None:
        """Set this rank's loss and flags; they become visible with the next published phase."""
        self.losses[self.rank] = loss
        self._flags[self.rank] = flags

    @property
    def flags(self) -> list[int]:
        """The last flags of each rank."""
        return self._flags.tolist()  # type: ignore[no-any-return]

    def announce(self, action: int) -> None:
        """Publish the next phase, and the action that this rank begins in it. ``wait`` must follow, then ``agree``."""
        phase = self.phase + 1
        # A number that a rank which announces nothing in this phase does not have.
        self._words[self.rank * WORDS + _ACTIONS + phase % 2] = (phase * 1_000_003 + action) & ((1 << 62) - 1)
        self.advance()

    def agree(self) -> bool:
        """Return whether all ranks have announced the same action in the last phase, which all have published."""
        announced = self._words[_ACTIONS + self.phase % 2 :: WORDS]
        return bool((announced == announced[self.rank]).all())

    def advance(self) -> int:
        """Publish the next phase, and return it."""
        self.phase += 1
        self.publish(self.phase)
        return self.phase

    def meet(self, progress: Callable[[], object] | None = None) -> None:
        """Return when every rank has called this method; ``progress`` as for ``wait``."""
        self.wait(self.advance(), progress)

    def publish(self, phase: int) -> None:
        """Announce that this rank has reached ``phase``; everything it has written may be read."""
        store(self._words, self._at, phase)

    def reached(self, phase: int) -> bool:
        """Return whether every rank has published ``phase``."""
        return _reached(self._words, self.size, phase, 1)  # type: ignore[no-any-return]

    def behind(self, phase: int) -> list[int]:
        """Return the ranks of the node that have not published ``phase``."""
        return np.flatnonzero(self._words[_PHASE::WORDS] < phase).tolist()

    def any_reached(self, phase: int) -> bool:
        """Return whether some rank has published ``phase``."""
        return _any_reached(self._words, self.size, phase)  # type: ignore[no-any-return]

    def poll(self, phase: int, polls: int) -> bool:
        """Return whether every rank publishes ``phase`` within a number of polls, without yielding the core."""
        return _reached(self._words, self.size, phase, polls)  # type: ignore[no-any-return]

    def wait(self, phase: int, progress: Callable[[], object] | None = None) -> None:
        """Return when every rank has published ``phase``.

        ``progress`` is called repeatedly while waiting, so that MPI makes progress between nodes.

        Exits the process if its launcher has been killed.
        """
        began = perf_counter()
        self._waiting.until(lambda spins: _reached(self._words, self.size, phase, spins), progress, self._slowest_rank)
        self.waited_s += perf_counter() - began

    def _slowest_rank(self) -> int:
        return self._ranks[int(np.argmin(self._words[_PHASE::WORDS]))]
