"""The signals that ``mpitrain run`` receives."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ..process import host_watcher
from .terminal import say

_ONCE_S = 0.1  # a scheduler may signal each process of a job and also the whole process group


class Interrupts:
    """The signals received by this process, in order; the handler only records them.

    Further signals within 0.1 s of the first one count as its duplicates.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._first_at = 0.0
        self._echoed = 0  # number of times that Ctrl-C was pressed before the last ``end_echo``

    def recorded(self) -> AbstractContextManager[None]:
        return _handling(self._record, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def request_stop(self) -> None:
        """Act as if SIGTERM had been received, unless a signal was."""
        if not self.received:
            self._record(signal.SIGTERM, None)

    def end_echo(self) -> None:
        """Begin a new line if the terminal has shown ``^C`` since the last call."""
        echoed = self.received.count(signal.SIGINT)
        if echoed > self._echoed and sys.stderr.isatty():
            print(file=sys.stderr, flush=True)
        self._echoed = echoed

    def _record(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.received and now < self._first_at + _ONCE_S:
            return
        self._first_at = self._first_at or now
        self.received.append(number)


class Suspension:
    """Suspends a run after Ctrl-Z, until the user continues it.

    Args:
        is_possible: Whether all ranks are on this host. While this process is suspended, other hosts would treat its
            link as lost.
    """

    def __init__(self, run_dir: Path, is_possible: bool) -> None:
        self._run_dir, self._is_possible, self._is_requested = str(run_dir), is_possible, False

    def recorded(self) -> AbstractContextManager[None]:
        """Record Ctrl-Z inside the block."""
        return _handling(self._record, signal.SIGTSTP)

    def poll(self) -> None:
        """Suspend the run if Ctrl-Z was pressed; return when it continues."""
        if not self._is_requested:
            return
        self._is_requested = False
        if not self._is_possible:
            say("a run on several hosts cannot be suspended; press Ctrl-C to save and exit")
            return
        # The launcher is not suspended: if this process is killed, the launcher must still be able to end the ranks.
        host_watcher.signal_ranks(self._run_dir, signal.SIGSTOP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._record)
        host_watcher.signal_ranks(self._run_dir, signal.SIGCONT)

    def _record(self, number: int, frame: object) -> None:
        self._is_requested = True


@contextmanager
def _handling(handler: Callable[[int, object], None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals inside the block; a SIGHUP that nohup ignores, and an ignored SIGTSTP, stay ignored."""
    before = {number: signal.getsignal(number) for number in numbers}
    for number, previous in before.items():
        if number not in (signal.SIGHUP, signal.SIGTSTP) or previous is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
