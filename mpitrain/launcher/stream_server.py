"""The standard streams of ranks: what they write is merged by lines, and one rank may read the user's input."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from ..process.network import own_addresses
from ..process.stream_client import ACCEPTED, ALL, HEADER, describe, socket_name
from .output_filter import LauncherFilter
from .standard_input import StandardInput
from .terminal import forward

_PART_S = 0.03  # time after which the beginning of a line is written without the rest
_LONGEST_PART = 1 << 20  # maximum number of bytes of a line that are held back
_CHUNK = 1 << 16
_HEADER_S = 5.0  # maximum time for a rank to send its header
_FINISH_S = 1.0  # maximum time for the output of ranks that have ended to arrive
_BACKLOG = 512


@dataclass
class Source:
    """The output of one process.

    Attributes:
        writer: Who writes it: the number of a rank, or the launcher.
        filter: The filter of a launcher's messages; None for ranks.
        part: The beginning of a line, which is held back.
        since: When that arrived, by the monotonic clock.
    """

    writer: object
    filter: LauncherFilter | None = None
    part: bytes = b""
    since: float = 0.0


class MergedOutput(threading.Thread):
    """Writes the output of all sources to one stream; lines of different writers do not mix.

    While the stream accepts nothing, nothing is read, so that the writers wait, too.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._stream, self._selector = stream, selectors.DefaultSelector()
        self._added: list[tuple[int, Source]] = []
        self._is_closing = False
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.start()

    def add(self, descriptor: int, source: Source) -> None:
        """Write what can be read from a descriptor, which is closed at its end. From any thread."""
        self._added.append((descriptor, source))
        os.write(self._wake, b"+")

    def finish(self, timeout: float) -> None:
        """Wait until all sources have ended, or a timeout in seconds: a process left behind may keep one open."""
        self._is_closing = True
        os.write(self._wake, b"+")
        self.join(timeout)

    def run(self) -> None:
        sources: dict[int, Source] = {}
        while sources or self._added or not self._is_closing:
            is_holding = any(source.part for source in sources.values() if source.filter is None)
            for key, _ in self._selector.select(_PART_S if is_holding else None):
                if key.fd == self._woken:
                    os.read(self._woken, _CHUNK)
                elif not self._read(key.fd, sources[key.fd]):
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    del sources[key.fd]
            while self._added:
                descriptor, source = self._added.pop()
                sources[descriptor] = source
                self._selector.register(descriptor, selectors.EVENT_READ)
            for source in sources.values():
                if source.part and source.filter is None and time.monotonic() > source.since + _PART_S:
                    part, source.part = source.part, b""
                    self._write(source, part)

    def _read(self, descriptor: int, source: Source) -> bool:
        """Read from a source and write its complete lines; return whether it has not ended."""
        try:
            data = os.read(descriptor, _CHUNK)
        except OSError:  # the connection to another host is lost
            data = b""
        held, source.since = source.part + data, time.monotonic()
        end = held.rfind(b"\n") + 1 if data and len(held) < _LONGEST_PART else len(held)
        lines, source.part = held[:end], held[end:]
        self._write(source, lines)
        if not data and source.filter is not None:
            forward(self._stream, source.filter.rest(), source.writer)
        return bool(data)

    def _write(self, source: Source, data: bytes) -> None:
        forward(self._stream, data if source.filter is None else source.filter.feed(data), source.writer)


class StreamServer:
    """Gives the ranks of one attempt their standard streams; see ``process.stream_client``.

    Args:
        user_input: The user's standard input.
        input_rank: The rank that may read it; None for no rank.
        is_remote: Whether ranks may run on other hosts.

    Attributes:
        output, errors: What is written to this process's standard output and standard error.
        description: The value of the variable by which ranks find this server.
    """

    def __init__(self, user_input: StandardInput, input_rank: int | None, is_remote: bool) -> None:
        self._input, self._input_rank, token = user_input, input_rank, secrets.token_hex(16)
        self._token, self._null = token.encode(), os.open(os.devnull, os.O_RDONLY)
        self.output, self.errors = MergedOutput(sys.stdout.buffer), MergedOutput(sys.stderr.buffer)
        local = socket.socket(socket.AF_UNIX)
        local.bind(socket_name(token))
        local.listen(_BACKLOG)
        self._listening, addresses = [local], []
        if is_remote:
            self._listening.append(socket.create_server(("", 0), backlog=_BACKLOG))
            addresses = [(address, self._listening[1].getsockname()[1]) for address in own_addresses()]
        self.description = describe(token, input_rank, addresses)
        for listening in self._listening:
            _start(self._accept, listening)

    def close(self) -> None:
        """Write what the ranks have written, and accept no more ranks."""
        for listening in self._listening:
            listening.shutdown(socket.SHUT_RDWR)  # makes the other thread return from ``accept``
            listening.close()
        self.output.finish(_FINISH_S)
        self.errors.finish(_FINISH_S)
        os.close(self._null)

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                _start(self._admit, listening.accept()[0])

    def _admit(self, connection: socket.socket) -> None:
        """Give a rank its streams, if it knows the token."""
        with connection, contextlib.suppress(OSError, struct.error):
            connection.settimeout(_HEADER_S)
            header = connection.recv(HEADER.size)
            while 0 < len(header) < HEADER.size and (more := connection.recv(HEADER.size - len(header))):
                header += more
            token, rank, number = HEADER.unpack(header)
            if not hmac.compare_digest(token, self._token):
                return
            if number == ALL:
                self._send_descriptors(connection, rank)
                return
            connection.sendall(ACCEPTED)
            connection.settimeout(None)
            if number == 0 and rank == self._input_rank:
                self._input.copy_to(connection)
            elif number in (1, 2):
                (self.output, self.errors)[number - 1].add(connection.detach(), Source(rank))

    def _send_descriptors(self, connection: socket.socket, rank: int) -> None:
        """Send a rank on this host its standard input, and pipes for its output."""
        descriptors = [self._input.descriptor if rank == self._input_rank else self._null]
        for merged in (self.output, self.errors):
            reading, writing = os.pipe()
            descriptors.append(writing)
            merged.add(reading, Source(rank))
        try:
            socket.send_fds(connection, [ACCEPTED], descriptors)
        finally:
            for writing in descriptors[1:]:
                os.close(writing)


def _start(function: Callable[[socket.socket], None], argument: socket.socket) -> None:
    threading.Thread(target=function, args=(argument,), daemon=True).start()
