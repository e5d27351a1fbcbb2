"""The user's standard input: one rank of a program may read it, and nothing else in a run does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat
import struct
import termios

from ..process.standard_streams import is_of_foreground

_WAIT_S = 0.5


class StandardInput:
    """Takes over standard input: this process, and the processes that it starts, get an empty one.

    A rank on this host gets the descriptor itself, and reads only what it needs. Terminals in the background give
    nothing: the user's shell reads them.

    Attributes:
        descriptor: The user's standard input.
    """

    def __init__(self) -> None:
        null = os.open(os.devnull, os.O_RDONLY)
        self.descriptor = os.dup(0 if is_of_foreground(0) else null)
        os.dup2(null, 0)
        os.close(null)
        self._kind = os.fstat(self.descriptor).st_mode
        self._left = self._count()
        self._was_read, self._has_ended = False, self._is_at_end()

    def was_read(self) -> bool:
        """Return whether something was read from a file or a pipe; call often. A terminal gives more on request."""
        left = self._count()
        self._was_read |= left < self._left or (self._is_at_end() and not self._has_ended)
        self._left = left
        return self._was_read

    def copy_to(self, connection: socket.socket) -> None:
        """Send standard input, and its end, to a rank on another host."""
        with contextlib.suppress(OSError):
            while True:
                ready = select.select([self.descriptor], [], [], _WAIT_S)[0]
                if not ready or not is_of_foreground(self.descriptor):
                    continue
                data = os.read(self.descriptor, 1 << 16)
                if not data:
                    break
                self._was_read = True
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
