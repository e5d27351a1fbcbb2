"""Who takes part in a run of learners, which examples each of them trains, and who merges.

The ledger is one small value that every change replaces as a whole (``store.Register``). The stream of examples is
given out in ranges. A learner holds the ranges that it has claimed until its work on them is merged. If it dies, what
is not merged is given out again: each example of an epoch is trained at least once, and those of ranges that were given
out again perhaps twice.

Each process of a learner has a generation. What was sent in an older generation is not merged. So a process that others
believe dead, or that another process has replaced, changes nothing any more, and its examples are not lost.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from .store import Register, Store

Range = tuple[int, int]  # first example of the stream, and the example after the last


class Left(Enum):
    """Whether examples are left for a learner: not if all are given out, to learners that live."""

    SOME = 0
    UNKNOWN = 1
    NONE = 2


@dataclass
class Member:
    """A learner.

    Attributes:
        generation: Increases with each process, and when the learner is given up; 0 before the first process.
        process: Identifies the process; empty if there is none.
        merged: Number of examples of this generation's ranges that were merged, and are no longer in ``held``.
        held: The ranges that it has claimed in this generation, in the order of training.
        steps: Number of its steps in earlier generations whose work was merged.
    """

    generation: int = 0
    process: str = ""
    merged: int = 0
    held: list[Range] = field(default_factory=list)
    steps: int = 0


@dataclass
class Ledger:
    """The state of a run of learners.

    Attributes:
        facts: What all learners must have in common, by name.
        total: Number of examples to train.
        unit: Number of examples of a step of the first learner, in which the run counts its steps.
        next: The first example that was never given out.
        free: Ranges to be given out again.
        holder: The name of the learner that merges; empty if none does.
        lease: Number of times that this duty was taken.
        members: The learners by name.
        ended: Why a learner has ended the run early; empty if none has.
    """

    facts: dict[str, Any]
    total: int
    unit: int = 1
    next: int = 0
    free: list[Range] = field(default_factory=list)
    holder: str = ""
    lease: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    ended: str = ""

    @classmethod
    def parse(cls, data: bytes) -> Ledger:
        """Return the ledger from the bytes that ``dump`` has returned.

        Raises:
            OSError: The bytes are damaged.
        """
        try:
            values = json.loads(data)
            members = {
                name: Member(**member | {"held": [(lo, hi) for lo, hi in member["held"]]})
                for name, member in values.pop("members").items()
            }
            return cls(**values | {"free": [(lo, hi) for lo, hi in values["free"]]}, members=members)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise OSError("the newest file of the ledger is damaged") from None

    def dump(self) -> bytes:
        """Return the ledger as bytes."""
        return json.dumps(asdict(self)).encode()

    @property
    def is_given_out(self) -> bool:
        """Whether there are no more examples to claim."""
        return not self.free and self.next >= self.total

    @property
    def living(self) -> int:
        """The number of learners that have a process."""
        return sum(bool(member.process) for member in self.members.values())

    def join(self, name: str, process: str, merged: int, steps: int = 0) -> int:
        """Add a learner, or a new process of it; return its generation.

        Args:
            merged, steps: Number of examples, and of steps, of the former generation that were merged.
        """
        member = self.members.setdefault(name, Member())
        self.give_up(name, merged, steps)
        member.process = process
        return member.generation

    def give_up(self, name: str, merged: int, steps: int = 0) -> None:
        """Give a learner's ranges out again, without the first ``merged`` examples; it has no process any more."""
        member = self.members[name]
        self.settle(name, merged)
        skipped, rest = merged - member.merged, []
        for lo, hi in member.held:
            rest.append((lo + min(skipped, hi - lo), hi))
            skipped -= min(skipped, hi - lo)
        self.free = [each for each in rest if each[0] < each[1]] + self.free
        member.generation += 1
        member.process, member.merged, member.held = "", 0, []
        member.steps += steps

    def settle(self, name: str, merged: int) -> None:
        """Forget the ranges of a learner that were merged; ``merged`` counts the examples of its generation."""
        member = self.members[name]
        while member.held and merged - member.merged >= (size := member.held[0][1] - member.held[0][0]):
            del member.held[0]
            member.merged += size

    def claim(self, name: str, count: int, unit: int) -> Range | None:
        """Give a range of about ``count`` examples to a learner; None if all are given out.

        Args:
            unit: Number of examples of a step: the range has a multiple of it. If a range that is given out again has
                no such size, the new one begins earlier.
        """
        if self.free:
            lo, hi = self.free.pop(0)
            size = _whole(min(count, hi - lo), unit)
            if size < hi - lo:
                self.free.insert(0, (lo + size, hi))
            else:
                lo = max(0, hi - size)
        elif self.next < self.total:
            lo, size = self.next, _whole(min(count, self.total - self.next), unit)
            self.next = lo + size
        else:
            return None
        self.members[name].held.append((lo, lo + size))
        return lo, lo + size


class Ranges:
    """The ranges that a learner trains, one after the other. Local.

    Attributes:
        current: The range in training; empty before the first one.
    """

    def __init__(self) -> None:
        self.current: Range = (0, 0)
        self._following: deque[Range] = deque()
        self._before = 0  # examples of the ranges before this one
        self._left = Left.SOME

    def update(self, ranges: Iterable[Range], is_reset: bool, left: Left) -> None:
        """Add ranges; ``is_reset``: forget those before; ``left``: whether there are others after them."""
        if is_reset:
            self.current, self._before = (0, 0), 0
            self._following.clear()
        self._following.extend(ranges)
        self._left = left

    def trained(self, cursor: int) -> int:
        """Return the number of examples of all ranges that were trained until this position of the stream."""
        lo, hi = self.current
        return self._before + max(0, min(cursor, hi) - lo)

    def take_next(self, cursor: int) -> bool:
        """Begin the next range if this one has ended at ``cursor`` and there is a next one; return whether it began."""
        lo, hi = self.current
        if cursor < hi or not self._following:
            return False
        self._before += hi - lo
        self.current = self._following.popleft()
        return True

    def has_ended(self, cursor: int) -> bool:
        """Return whether all examples were trained that this learner will get."""
        return self._left is Left.NONE and not self.has_more(cursor)

    def is_at_end(self, cursor: int) -> bool:
        """Return whether all examples were trained that are known so far, and no others yet."""
        return cursor == self.current[1] and not self._following

    def must_wait(self, cursor: int) -> bool:
        """Return whether all examples were trained, but others may be left or are being claimed."""
        return self._left is Left.UNKNOWN and not self.has_more(cursor)

    def has_more(self, cursor: int) -> bool:
        """Return whether this range has not ended, or there is a next one."""
        return cursor < self.current[1] or bool(self._following)


def ledger_in(store: Store) -> Register:
    """Return the register of the ledger in a store."""

    def is_intact(data: bytes) -> bool:
        """Return whether this may be a ledger, also one of a later version."""
        try:
            return isinstance(json.loads(data), dict)
        except ValueError:
            return False

    return Register(store, "ledger", keep=64, is_intact=is_intact)


def change(register: Register, apply: Callable[[Ledger], object]) -> Ledger:
    """Change the newest ledger by ``apply``, again if other processes have changed it meanwhile; return the result.

    Raises:
        OSError: The ledger cannot be read or written.
    """
    while True:
        version = register.read()
        ledger = Ledger.parse(version.data)
        apply(ledger)
        data = ledger.dump()
        if data == version.data or register.swap(version, data):
            return ledger


def _whole(count: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``count``."""
    return -(-count // unit) * unit
