"""The signals that ``mpitrain run`` receives."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_ONCE_S = 0.1  # a scheduler may signal each process of a job and also the whole process group


class Interrupts:
    """The signals received by this process, in order; the handler only records them.

    Further signals within 0.1 s of the first one count as its duplicates.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._first_at = 0.0
        self._echoed = 0  # number of times that Ctrl-C was pressed before the last ``end_echo``

    @contextmanager
    def recorded(self) -> Iterator[None]:
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        before = {number: signal.getsignal(number) for number in signals}
        for number, handler in before.items():
            if number != signal.SIGHUP or handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._record)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

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
