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

from ..process.network import address_in, own_addresses
from ..process.stream_client import ACCEPTED, ALL, HEADER, describe, socket_name
from .output_filter import LauncherFilter
from .standard_input import StandardInput
from .terminal import forward

_PART_S = 0.03  # time after which the beginning of a line is written without the rest
_LONGEST_PART = 1 << 20  # maximum number of bytes of a line that are held back
_CHUNK = 1 << 16
_HEADER_S = 5.0  # maximum time for a rank to send its header
_SILENCE_S = 1.0  # time without output after which that of ranks that have ended is complete
_LAST_S = 0.5  # maximum time for the reapers of programs to write their last output
_POLL_S = 0.05
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
        self._stream, self._selector = stream, selectors.EpollSelector()
        self._active_at, self._is_writing = 0.0, False
        ending, self._ending = os.pipe()
        self.add(ending, Source(None))

    def add(self, descriptor: int, source: Source) -> None:
        """Write what can be read from a descriptor, which is closed at its end. From any thread."""
        self._selector.register(descriptor, selectors.EVENT_READ, source)

    @property
    def has_sources(self) -> bool:
        """Whether a process may still write."""
        return len(self._selector.get_map() or ()) > 1

    def finish(self, has_given_up: Callable[[], bool]) -> None:
        """Wait until all sources have ended, or are silent for a second: a process left behind may keep one open."""
        os.close(self._ending)
        self._active_at = time.monotonic()
        while self.is_alive() and (self._is_writing or time.monotonic() < self._active_at + _SILENCE_S):
            self.join(_POLL_S)
            if has_given_up():
                return

    def run(self) -> None:
        held: dict[int, Source] = {}  # those that hold the beginning of a line
        while self._selector.get_map():
            for key, _ in self._selector.select(_PART_S if held else None):
                held[key.fd] = key.data
                if not self._read(key.fd, key.data):
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    del held[key.fd]
            held = {fd: source for fd, source in held.items() if source.part and source.filter is None}
            for source in held.values():
                if time.monotonic() > source.since + _PART_S:
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
        self._is_writing = True
        forward(self._stream, data if source.filter is None else source.filter.feed(data), source.writer)
        self._active_at, self._is_writing = time.monotonic(), False


class StreamServer:
    """Gives the ranks of one attempt their standard streams; see ``process.stream_client``.

    Args:
        input_rank: The rank that may read the user's standard input; None for no rank.
        is_remote: Whether ranks may run on other hosts.
        network: Their network, if the user has named it.

    Attributes:
        input: The user's standard input.
        output, errors: What is written to this process's standard output and standard error.
        description: The value of the variable by which ranks find this server.
    """

    def __init__(self, user_input: StandardInput, input_rank: int | None, is_remote: bool, network: str | None) -> None:
        self.input, self._input_rank, token = user_input, input_rank, secrets.token_hex(16)
        self._token = token.encode()
        self.output, self.errors = MergedOutput(sys.stdout.buffer), MergedOutput(sys.stderr.buffer)
        local = socket.socket(socket.AF_UNIX)
        local.bind(socket_name(token))
        local.listen(_BACKLOG)
        self._listening, addresses = [local], []
        if is_remote:
            self._listening.append(socket.create_server(("", 0), backlog=_BACKLOG))
            preferred = None if network is None else address_in(network)
            hosts = sorted(own_addresses(), key=lambda address: address != preferred)
            addresses = [(host, self._listening[1].getsockname()[1]) for host in hosts]
        self.description = describe(token, input_rank, addresses)

    def start(self) -> None:
        """Accept ranks, and write what is written; call after the launcher was forked: this starts threads."""
        for merged in (self.output, self.errors):
            merged.start()
        for listening in self._listening:
            threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def await_reapers(self) -> None:
        """Give the reapers of programs that have ended a moment to pass on what these have written."""
        deadline = time.monotonic() + _LAST_S
        while time.monotonic() < deadline and (self.output.has_sources or self.errors.has_sources):
            time.sleep(_POLL_S)

    def close(self, has_given_up: Callable[[], bool]) -> None:
        """Accept no more ranks, and wait until their output is written, or the user has given up."""
        for listening in self._listening:
            listening.shutdown(socket.SHUT_RDWR)  # makes the other thread return from ``accept``
            listening.close()
        for merged in (self.output, self.errors):
            merged.finish(has_given_up)

    def _accept(self, listening: socket.socket) -> None:
        while listening.fileno() >= 0:
            try:
                connection, _ = listening.accept()
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            except OSError:  # closed, or a connection was lost, or there are too many descriptors
                time.sleep(_POLL_S)

    def _admit(self, connection: socket.socket) -> None:
        """Give a rank its streams, if it knows the token."""
        with connection, contextlib.suppress(OSError, struct.error):
            connection.settimeout(_HEADER_S)
            token, rank, number = HEADER.unpack(connection.makefile("rb", 0).read(HEADER.size))
            if not hmac.compare_digest(token, self._token):
                return
            if number == ALL:
                self._send_descriptors(connection, rank)
                return
            connection.sendall(ACCEPTED)
            connection.settimeout(None)
            if number == 0 and rank == self._input_rank:
                self.input.copy_to(connection)
            elif number in (1, 2):
                (self.output, self.errors)[number - 1].add(connection.detach(), Source(rank))

    def _send_descriptors(self, connection: socket.socket, rank: int) -> None:
        """Send a rank on this host pipes for its output, and the user's standard input if it may read that."""
        with contextlib.ExitStack() as stack:
            descriptors = []
            for merged in (self.output, self.errors):
                reading, writing = os.pipe()
                stack.callback(os.close, writing)
                descriptors.append(writing)
                merged.add(reading, Source(rank))
            given = [self.input.descriptor] if rank == self._input_rank else []
            socket.send_fds(connection, [ACCEPTED], [*descriptors, *given])
