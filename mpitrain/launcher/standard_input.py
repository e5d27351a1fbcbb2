"""The user's standard input: one rank may read it, and nothing else in a run does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat
import struct
import termios
import time

from ..process.standard_streams import may_read, use_null

_WAIT_S = 0.5


class StandardInput:
    """Takes over standard input: this process, and the processes that it starts, get an empty one.

    A rank on this host gets the descriptor itself, and reads only what it needs. A terminal in the background gives
    nothing: the user's shell reads it.

    Attributes:
        descriptor: The user's standard input.
        was_read: Whether something was read from a file or a pipe, as of the last ``poll``. A terminal can give more.
    """

    def __init__(self) -> None:
        if not may_read(0):
            use_null(0)
        self.descriptor = os.dup(0)
        use_null(0)
        self._settings = termios.tcgetattr(self.descriptor) if os.isatty(self.descriptor) else None
        self._kind = os.fstat(self.descriptor).st_mode
        self._left, self._has_ended = self._count(), self._is_at_end()
        self.was_read = False

    def poll(self) -> None:
        """Notice what was read; call often."""
        left = self._count()
        if left < self._left or (self._is_at_end() and not self._has_ended):
            self.was_read = True
        self._left = left

    def restore(self) -> None:
        """Restore the settings of a terminal, which a rank that was killed may have changed."""
        if self._settings is not None and may_read(self.descriptor):
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.descriptor, termios.TCSADRAIN, self._settings)

    def copy_to(self, connection: socket.socket) -> None:
        """Send standard input, and its end, to a rank on another host, until the rank ends."""
        with contextlib.suppress(OSError):
            while True:
                if not may_read(self.descriptor):
                    time.sleep(_WAIT_S)
                    continue
                ready = select.select([self.descriptor, connection.fileno()], [], [])[0]
                if connection.fileno() in ready:  # it is closed: the rank sends nothing
                    return
                data = os.read(self.descriptor, 1 << 16)
                if not data:
                    break
                self.was_read = True
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

    def _count(self) -> int:
        """Return a number that falls when something is read."""
        if stat.S_ISREG(self._kind):
            return -os.lseek(self.descriptor, 0, os.SEEK_CUR)
        if stat.S_ISFIFO(self._kind) or stat.S_ISSOCK(self._kind):
            with contextlib.suppress(OSError):
                return int(struct.unpack("i", fcntl.ioctl(self.descriptor, termios.FIONREAD, bytes(4)))[0])
        return 0

    def _is_at_end(self) -> bool:
        """Return whether a pipe is empty, and its writers have ended."""
        if not stat.S_ISFIFO(self._kind):
            return False
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return any(events == select.POLLHUP for _, events in poll.poll(0))
