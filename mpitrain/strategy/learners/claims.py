"""The examples that a learner claims in advance, so that it always has some to train."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from .ledger import Ledger, Left, Range, change
from .signs import Signs, parse_state
from .store import Register, Store
from .synchronizer import LOST_S, Version, give_up, merged_work

_MEASURE_S = 1.0  # seconds over which the speed is measured, at least
_RANGE_S = 20.0  # seconds of training for which examples are claimed at once
_AHEAD_S = 2.0  # seconds of training for which examples are claimed in advance
_SHARE = 8  # at most this part of a learner's share of the remaining examples is claimed at once
_SILENT_S = 5.0  # seconds without news from a learner that is waited for, after which it is reported
_log = logging.getLogger(__name__)


class Claims:
    """What a generation of a learner has claimed. The training thread takes what the learner's thread has claimed.

    Args:
        ledger: The register of the ledger.
        name: The learner's name.
        unit: Number of examples of a step.
        first: Number of examples to claim before the speed is known.

    Attributes:
        rate: Examples per second; 0 before it is known.
        count: Number of examples that this generation has claimed.
        left: Whether other examples are left after those.
    """

    def __init__(self, store: Store, ledger: Register, name: str, unit: int, first: int) -> None:
        self._store, self._ledger, self._name, self._unit, self._first = store, ledger, name, unit, first
        self._lock, self._ranges, self.left, self.count = threading.Lock(), list[Range](), Left.SOME, 0
        self.rate, self._measured = 0.0, (0.0, 0)  # the last measurement: when, and how many had been trained
        self._signs, self._asked = Signs(store), dict[tuple[str, int], bytes]()  # see ``_all_live``
        self._silent = set[tuple[str, int]]()  # those of them that were reported

    # Methods of the training thread.

    @property
    def has_news(self) -> bool:
        """Whether ``take`` returns a range."""
        return bool(self._ranges)

    def take(self) -> tuple[list[Range], Left]:
        """Return the ranges that were claimed since the last call, and ``left``."""
        with self._lock:
            ranges, self._ranges = self._ranges, []
            return ranges, self.left

    def begin(self) -> None:
        """Begin a generation."""
        with self._lock:
            self.count = 0

    # Methods of the learner's thread.

    def drop(self) -> None:
        """Drop the ranges that were not taken, because the generation has ended."""
        with self._lock:
            self._ranges, self.left = [], Left.SOME

    def measure(self, now: float, trained: int) -> None:
        """Measure the speed.

        Args:
            trained: Number of examples that this generation has trained.
        """
        since, before = self._measured
        if now - since >= _MEASURE_S:
            if since:
                speed = max(0, trained - before) / (now - since)
                self.rate = speed if not self.rate else (self.rate + speed) / 2
            self._measured = now, trained

    def claim_if_due(self, generation: int, trained: int, versions: Sequence[Version]) -> None:
        """Claim examples if few are left. Arguments as for ``measure`` and ``claim``."""
        if self.left is not Left.NONE and self.count - trained < max(self._unit, self.rate * _AHEAD_S):
            self.claim(generation, versions)

    def claim(self, generation: int, versions: Sequence[Version]) -> None:
        """Claim examples, but no more than a part of this learner's share of the remaining ones.

        Args:
            generation: The generation that trains.
            versions: The newest versions of the fragments.
        """
        (merged, _), count = merged_work(versions, self._name, generation), int(self.rate * _RANGE_S) or self._first

        def apply(ledger: Ledger) -> None:
            if ledger.members[self._name].generation == generation:
                ledger.settle(self._name, merged)
                most = (ledger.total - ledger.next) // (_SHARE * max(1, ledger.living))
                least = int(self.rate * _MEASURE_S)
                ledger.claim(self._name, max(self._unit, least, min(count, most)), self._unit)

        ledger = change(self._ledger, apply)
        member = ledger.members[self._name]
        if member.generation != generation:
            return
        is_last = ledger.is_given_out
        left = Left.SOME if not is_last else Left.NONE if self._all_live(ledger, versions) else Left.UNKNOWN
        with self._lock:
            self.left, claimed = left, member.merged
            for lo, hi in member.held:  # the ledger decides: an attempt that seemed to fail may have succeeded
                if claimed >= self.count:
                    self._ranges.append((lo, hi))
                    self.count += hi - lo
                claimed += hi - lo

    def _all_live(self, ledger: Ledger, versions: Sequence[Version]) -> bool:
        """Return whether all learners that hold examples have given a sign of life since this was first asked.

        Those that give none for a while are given up, so that this learner can claim their examples. Those of a learner
        that has ended are free soon, as far as it has not trained them.
        """
        all_live = True
        for name, member in ledger.members.items():
            if name == self._name or not member.held:
                continue
            state, silent_s = self._signs.look(name)
            first = self._asked.setdefault((name, member.generation), state)
            has_ended = bool(parse_state(state).get("ended"))
            all_live &= state != first and not has_ended
            if state != first or has_ended:
                continue
            if silent_s > LOST_S:
                give_up(self._store, self._ledger, versions, name, member.generation)
            elif silent_s > _SILENT_S and (name, member.generation) not in self._silent:
                self._silent.add((name, member.generation))
                _log.info("waiting for learner %s; after %.0f s without news, others train its examples", name, LOST_S)
        return all_live
