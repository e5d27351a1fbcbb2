"""The current activity of this process, on a page of memory that another process can read at any time.

The training thread marks its activities with ``enter`` and ``leave``, which only store integers. ``monitor.trace.span``
calls both functions. The process that watches a rank maps the same page, and reads from it whether the rank makes
progress.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

KINDS = tuple(
    """
    step load forward backward update average push pull wait serve save validate hooks compile start end done program
    """.split()
)
PAGE_VARIABLE = "MPITRAIN_ACTIVITY"  # the path of a program's page
STACKS_VARIABLE = "MPITRAIN_STACKS"  # the path of the file for its stacks
# The default limit of the time without progress: a multiple of the longest activity so far, and its lower bounds.
TIMES_LONGEST = 10
SHORTEST_LIMIT_S = 60.0
PATIENT_LIMIT_S = 600.0  # for hooks, for loading (a file system may fail over), and for programs
LONG_LIMIT_S = 1800.0  # limit for operations that take long, until ``set_limits`` is called
_WAIT = KINDS.index("wait")
_STATE, _STEP, _WAITS_FOR, _LIMIT_S, _LONG_LIMIT_S, _FIRST_STEP, _STACKS_PID, _PROGRESS, _BLOCKED, _ENDED = range(10)
_STACK, _STACK_WORDS = 16, 32
# The state is one word, the count times 32 plus the depth of the stack (below 32), so that a mark is one store.
_CHANGED, _ENTERED, _LEFT = 32, 33, 31
_TEXT = 8 * (_STACK + _STACK_WORDS)  # byte offset
_BYTES = 4096

_words: memoryview = memoryview(bytearray(_BYTES)).cast("q")  # replaced by ``write_to``
_thread = 0  # the thread whose activities are marked; 0 for none
_program_words: memoryview | None = None  # a program's page; empty if there is none, None before the first mark
_state = 0


@dataclass(frozen=True)
class Activity:
    """The activity of a process at one moment.

    Attributes:
        count: A counter that increases when an activity begins or ends, and with ``mark_progress``.
        step: Number of completed steps.
        steps: Number of steps of this process, which may have resumed; for a program, the number of its marks.
        kinds: The activities, the outermost first.
        waits_for: The rank that it waits for, if this is a single, known rank.
        limit_s: Seconds without progress after which it counts as hanging; 0 for never, None for the default.
        long_limit_s: The same for operations that take long.
        facts: Facts about the process, such as its role.
    """

    count: int
    step: int
    steps: int
    kinds: tuple[str, ...]
    waits_for: int | None
    limit_s: float | None
    long_limit_s: float
    facts: dict[str, Any]


class ActivityPage:
    """A page of memory that is shared with processes forked later, or that open ``path``. Every method is local.

    Args:
        kind: The outermost activity: ``start``, or ``program`` for a process that calls only ``progress``.
    """

    def __init__(self, kind: str = "start") -> None:
        self._file = os.memfd_create("activity")
        os.ftruncate(self._file, _BYTES)
        self.memory = mmap.mmap(self._file, _BYTES)
        self.words = memoryview(self.memory).cast("q")
        self.words[_STACK] = KINDS.index(kind)
        self.words[_LIMIT_S], self.words[_LONG_LIMIT_S] = -1, round(1e3 * LONG_LIMIT_S)

    @property
    def path(self) -> str:
        """The path at which this user's other processes can open the page while this process is alive."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def stacks_pid(self) -> int:
        """The process that writes its Python stacks on request; 0 if there is none."""
        return self.words[_STACKS_PID]

    @stacks_pid.setter
    def stacks_pid(self, pid: int) -> None:
        self.words[_STACKS_PID] = pid

    @property
    def exit_status(self) -> int | None:
        """The exit status of that process if its interpreter has ended; None before."""
        return self.words[_ENDED] - 1 if self.words[_ENDED] else None

    def read(self) -> Activity:
        """Return the activity at this moment; may be called by any process that has the page."""
        words = self.words
        count, depth = divmod(words[_STATE], _CHANGED)
        stack = words[_STACK : _STACK + depth + 1].tolist()
        kinds = tuple(KINDS[kind] for kind in stack if 0 <= kind < len(KINDS))
        if kinds == ("program",) and words[_BLOCKED] > 0:
            kinds = ("program", "wait")
        text = bytes(self.memory[_TEXT:]).split(b"\0", 1)[0]
        try:
            facts = json.loads(text) if text else {}
        except ValueError:  # the page is being written
            facts = {}
        waits_for, limit_s = words[_WAITS_FOR] - 1, words[_LIMIT_S]
        return Activity(
            count + words[_PROGRESS],
            words[_STEP],
            words[_PROGRESS] if kinds[:1] == ("program",) else words[_STEP] - words[_FIRST_STEP],
            kinds,
            waits_for if waits_for >= 0 else None,
            None if limit_s < 0 else limit_s / 1e3,
            words[_LONG_LIMIT_S] / 1e3,
            facts,
        )


def write_to(page: ActivityPage) -> None:
    """Mark the calling thread's activities on ``page`` from now on."""
    global _words, _thread, _state
    _words, _thread, _state = page.words, get_ident(), 0


def enter(kind: int) -> None:
    """Mark the beginning of an activity; ``kind`` is an index into ``KINDS``. Other threads' calls do nothing."""
    global _state
    if get_ident() == _thread:
        _state += _ENTERED
        _words[_STACK + _state % _STACK_WORDS] = kind
        _words[_STATE] = _state


def leave() -> None:
    """Mark the end of the innermost activity."""
    global _state
    if get_ident() == _thread:
        _state += _LEFT
        _words[_STATE] = _state


@contextmanager
def waiting() -> Iterator[None]:
    """Mark that this process waits for the other ranks, such as in a collective operation."""
    enter(_WAIT)
    words = _page_of_program()
    if words is not None:
        words[_BLOCKED] += 1
    try:
        yield
    finally:
        leave()
        if words is not None:
            words[_BLOCKED] -= 1


def become(kind: str) -> None:
    """Set the outermost activity, such as ``start``; ``steps`` counts from now on."""
    _words[_FIRST_STEP] = _words[_STEP]
    _words[_STACK] = KINDS.index(kind)
    _change()


def set_step(step: int) -> None:
    """Record the number of completed steps."""
    _words[_STEP] = step


def completed_steps() -> int:
    """Return the number that ``set_step`` has recorded."""
    return _words[_STEP]


def progress(step: int | None = None) -> None:
    """Report that this rank makes progress, for hang detection; does nothing if no launcher watches this process.

    Call it in the training loop and in other loops of a program that ``mpitrain run`` has started. Local; takes about
    a microsecond, and any thread may call it.

    Args:
        step: The number of completed steps, for ``mpitrain runs`` and messages; None: one more than before.
    """
    words = mark_progress()
    if words is not None:
        words[_STEP] = words[_STEP] + 1 if step is None else step


def mark_progress() -> memoryview | None:
    """Mark that this process makes progress; return the page of a program, or None if there is none."""
    words = _page_of_program()
    if words is not None:
        words[_PROGRESS] += 1
    elif _thread:  # a rank that marks its activities
        _words[_PROGRESS] += 1
    return words


def _page_of_program() -> memoryview | None:
    """Return the page of a program that ``mpitrain run`` has started; None if this process is not such a program."""
    global _program_words
    if _thread:
        return None
    if _program_words is None:
        _program_words = _open_page(os.environ.get(PAGE_VARIABLE))
    return _program_words if len(_program_words) else None


def _open_page(path: str | None) -> memoryview:
    """Return the page that the launcher has made for this program; empty if there is none."""
    if path is not None:
        try:
            with open(path, "r+b") as file:
                return memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")
        except OSError:  # the process is in another namespace, or the launcher has ended
            pass
    return memoryview(b"").cast("q")


def set_limits(limit_s: float | None, long_limit_s: float) -> None:
    """Set the seconds without progress after which this process counts as hanging; see ``Activity``."""
    _words[_LIMIT_S] = -1 if limit_s is None else round(1e3 * limit_s)
    _words[_LONG_LIMIT_S] = round(1e3 * long_limit_s)


def describe(**facts: Any) -> None:
    """Set facts for the watching process: values that JSON can hold, at most 3 KiB in all."""
    text = json.dumps(facts).encode() + b"\0"
    area = _words.cast("B")[_TEXT:]
    if len(text) <= len(area):
        area[: len(text)] = text


def wait_for(rank: int | None) -> None:
    """Mark that this process waits for ``rank``; None: for no single, known rank."""
    word = 0 if rank is None else rank + 1
    if get_ident() == _thread and _words[_WAITS_FOR] != word:
        _words[_WAITS_FOR] = word
        _change()


def _change() -> None:
    global _state
    _state += _CHANGED
    _words[_STATE] = _state


def _forget() -> None:
    global _thread
    _thread = 0


os.register_at_fork(after_in_child=_forget)  # a child process must not write to the page of its parent
