"""The lease: which learner merges."""

from __future__ import annotations

from .ledger import Ledger, change
from .signs import Signs
from .store import Register, Store

LEASE_S = 10.0  # seconds without a sign of life after which another learner merges


class Lease:
    """A learner's part in the lease; used by one thread. Methods raise OSError.

    Every lease has a number of its own. A former holder sees in the ledger that it has lost it; what it merges until
    then is as good as what the new one merges (``synchronizer.Synchronizer``).

    Args:
        name: The learner's name.

    Attributes:
        is_held: Whether this process merges, as far as it knows.
    """

    def __init__(self, store: Store, ledger: Register, name: str) -> None:
        self._ledger, self._name, self._signs = ledger, name, Signs(store)
        self.is_held, self._number = False, 0

    def is_free(self, ledger: Ledger) -> bool:
        """Return whether no other process merges, or none that has given a sign of life for ``LEASE_S``."""
        return ledger.holder in ("", self._name) or self._signs.look(ledger.holder)[1] > LEASE_S

    def take(self, seen: Ledger) -> None:
        """Take the lease, unless another learner has done so since ``seen``."""

        def apply(ledger: Ledger) -> None:
            if ledger.lease == seen.lease:
                ledger.holder, ledger.lease = self._name, seen.lease + 1

        ledger = change(self._ledger, apply)
        self._number = seen.lease + 1
        self.is_held = (ledger.holder, ledger.lease) == (self._name, self._number)

    def check(self, ledger: Ledger) -> None:
        """Note whether another learner has taken the lease."""
        self.is_held &= ledger.lease == self._number

    def resign(self) -> None:
        """Leave the lease to others."""

        def apply(ledger: Ledger) -> None:
            if ledger.lease == self._number:
                ledger.holder = ""

        change(self._ledger, apply)
        self.is_held = False
