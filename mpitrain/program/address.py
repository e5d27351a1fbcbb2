"""The address and port at which rank 0 of a program accepts connections from the other ranks."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from ..errors import LaunchError
from ..process.launcher_env import NETWORK
from ..process.network import address_in

_PORTS = range(20_000, 32_768)  # below the ports that Linux assigns to outgoing connections


def choose_address(environ: Mapping[str, str], on_one_host: bool) -> str:
    """Return an address of this host that all ranks can reach, or the user's ``MASTER_ADDR``.

    Raises:
        LaunchError: The user's address is not an address of this host.
    """
    if address := environ.get("MASTER_ADDR"):
        return _checked(address)
    return "127.0.0.1" if on_one_host else _own_address(environ.get(NETWORK))


def _checked(address: str) -> str:
    """Return the address that the user has set.

    Raises:
        LaunchError: The address is not an address of this host, so that no rank could connect.
    """
    for family, kind, *_, socket_address in _addresses_of(address):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(socket_address)
            return address
    raise LaunchError(
        f"MASTER_ADDR={address}: not an address of {socket.gethostname()}, the host "
        f"of rank 0; unset it to use the right address"
    )


def _addresses_of(name: str) -> list[Any]:
    with suppress(OSError):
        return socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    return []


def _own_address(network: str | None) -> str:
    """Return an address of this host that other hosts can reach; a name if no such address is known."""
    if network is not None and (address := address_in(network)) is not None:
        return address
    addresses = [str(sockaddr[0]) for *_, sockaddr in _addresses_of(socket.gethostname())]
    if outside := [address for address in addresses if not ipaddress.ip_address(address).is_loopback]:
        return outside[0]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing; it selects the address of the default route.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return socket.gethostname()


def choose_port(environ: Mapping[str, str]) -> int:
    """Return a free port of this host, or the user's ``MASTER_PORT``.

    Raises:
        LaunchError: The user's port is not valid, or in use.
    """
    port = environ.get("MASTER_PORT")
    if port is None:
        return next(port for port in _candidates() if _is_free(port))
    if not port.isdigit() or not 0 < int(port) < 65_536:
        raise LaunchError(f"MASTER_PORT={port}: must be a number from 1 to 65535; unset it to use a free port")
    if not _is_free(int(port)):
        raise LaunchError(
            f"MASTER_PORT={port}: the port is in use on {socket.gethostname()}; unset it to use a free port"
        )
    return int(port)


def _candidates() -> Iterator[int]:
    source = random.SystemRandom()
    while True:
        yield source.choice(_PORTS)


def _is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False  # otherwise this host does not support the protocol
    return True
