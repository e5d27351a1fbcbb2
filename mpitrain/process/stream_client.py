"""The standard streams of a rank under ``mpitrain run``, without the launcher of the MPI library between them.

The streams that a launcher gives to its ranks are not good enough: its own messages stand between their lines, Open MPI
never ends the standard input of several ranks, and MPICH ends the run if that is read too slowly. A rank therefore
connects to ``mpitrain run`` before it prints anything. On the same host it gets descriptors of pipes and of the user's
standard input; from another host each stream is a connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import sys

from .launcher_env import launched_rank
from .standard_streams import use_null

VARIABLE = "MPITRAIN_STREAMS"  # see ``describe``
HEADER = struct.Struct("!32sII")  # the run's token, the rank, and its stream: 0 to 2, or ``ALL``
ALL = 3
ACCEPTED = b"+"
_CONNECT_S = 5.0  # maximum time for a connection to one address


def describe(token: str, input_rank: int | None, addresses: list[tuple[str, int]]) -> str:
    """Return the value of ``VARIABLE``.

    Args:
        token: 32 characters that only processes of the run know.
        input_rank: The rank that reads the user's standard input; None for no rank.
        addresses: The addresses of ``mpitrain run`` for ranks on other hosts.
    """
    return json.dumps([token, input_rank, addresses])


def socket_name(token: str) -> str:
    """Return the name of the socket for ranks on the host of ``mpitrain run``, which does not reveal the token."""
    return f"\0mpitrain-{hashlib.sha256(token.encode()).hexdigest()[:24]}"


def connect() -> None:
    """Replace the standard streams of this rank by those of ``mpitrain run``, if that has started it. Local.

    If no connection is possible, the launcher's streams stay, and a line says so.
    """
    value = os.environ.pop(VARIABLE, None)
    if value is None:
        return
    token, input_rank, addresses = json.loads(value)
    rank = launched_rank(os.environ)
    if rank != input_rank:
        use_null(0)
    if input_rank not in (None, rank):
        os.environ.setdefault("PYTHONBREAKPOINT", "0")  # the debugger would end at once: it has nothing to read
    with contextlib.suppress(OSError), _connection(socket_name(token), token, rank, ALL) as local:
        _, descriptors, _, _ = socket.recv_fds(local, 1, 3)
        if descriptors:
            for number, descriptor in zip((1, 2, 0), descriptors, strict=False):
                _replace(number, descriptor)
            return
    for host, port in addresses:
        with contextlib.suppress(OSError):
            numbers = (0, 1, 2) if rank == input_rank else (1, 2)
            streams = {number: _connection((host, port), token, rank, number) for number in numbers}
            for number, stream in streams.items():
                if stream.recv(1) != ACCEPTED:
                    raise ConnectionError
                stream.settimeout(None)
                _replace(number, stream.detach())
            return
    tried = f" at {', '.join(f'{host}:{port}' for host, port in addresses)}" if addresses else ""
    where = f"{socket.gethostname()} cannot connect to mpitrain run{tried}"
    print(f"mpitrain: rank {rank}: {where}; its output comes through mpirun", file=sys.stderr, flush=True)


def _connection(address: str | tuple[str, int], token: str, rank: int, number: int) -> socket.socket:
    """Return a connection to ``mpitrain run`` for a stream of this rank.

    Raises:
        OSError: There is none.
    """
    connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    try:
        connection.settimeout(_CONNECT_S)
        connection.connect(address)
        connection.sendall(HEADER.pack(token.encode(), rank, number))
    except OSError:
        connection.close()
        raise
    return connection


def _replace(number: int, descriptor: int) -> None:
    os.dup2(descriptor, number)
    os.close(descriptor)
