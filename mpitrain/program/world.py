"""How the ranks of a program find each other before it starts: a table of the ranks, and an address for rank 0.

The ranks cannot use MPI for this, because the program may start MPI itself. They use the run directory, which all
hosts share: each rank writes its entry, rank 0 reads all of them and writes the world, and the others wait for it.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..process.launcher_env import NETWORK
from ..process.network import address_in

_WORLD, _ENDED = "world", "ended-"  # names of files; the latter with a rank
_MEETING_S = 300.0
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.002, 0.2
_PORTS = range(20_000, 32_768)  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class Entry:
    """What one rank knows about itself.

    Attributes:
        host: Its host's name.
        cores: The cores that it may use.
        devices: Its ``CUDA_VISIBLE_DEVICES``; None if not set.
        error: Why it cannot start the program; empty if it can.
    """

    host: str
    cores: tuple[int, ...]
    devices: str | None = None
    error: str = ""


@dataclass(frozen=True)
class World:
    """All ranks of a program.

    Attributes:
        entries: By rank.
        address, port: Where rank 0 accepts connections of the others; a number and a free port of its host.
        stop_at: When the program is asked to stop, in seconds since the epoch; None for never.
    """

    entries: Sequence[Entry]
    address: str
    port: int
    stop_at: float | None = None

    @property
    def hosts(self) -> list[str]:
        """The hosts, in the order of their first ranks."""
        return list(dict.fromkeys(entry.host for entry in self.entries))

    def ranks_on(self, host: str) -> list[int]:
        """Return the ranks on a host."""
        return [rank for rank, entry in enumerate(self.entries) if entry.host == host]

    def cores_of(self, rank: int) -> int:
        """Return the cores per rank: its host's divided by the host's ranks, at most those that it is bound to."""
        ranks = self.ranks_on(self.entries[rank].host)
        cores = {core for other in ranks for core in self.entries[other].cores}
        return max(1, min(len(cores) // len(ranks), len(self.entries[rank].cores)))


def own_entry(environ: Mapping[str, str], error: str) -> Entry:
    """Return the entry of this process."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return Entry(socket.gethostname(), cores, environ.get("CUDA_VISIBLE_DEVICES"), error)


def meet(
    folder: Path,
    rank: int,
    size: int,
    entry: Entry,
    environ: Mapping[str, str],
    prepare: Callable[[World], float | None],
) -> World:
    """Return the world, the same on every rank. Collective over all ranks.

    Args:
        folder: A folder of this launch, which all hosts share.
        environ: With ``MASTER_ADDR`` and ``MASTER_PORT`` if the user has set them.
        prepare: Called on rank 0, before the other ranks continue; returns ``stop_at``.

    Raises:
        LaunchError: On every rank: a rank cannot start the program, or has not come, or ``prepare`` has failed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / str(rank), asdict(entry))
        if rank == 0:
            _write(folder / _WORLD, _make_world(folder, size, environ, prepare))
        (found,) = _read_all(folder, [_WORLD])
    except OSError as error:
        raise LaunchError(f"the run directory {folder.parents[1]} cannot be written: {error.strerror}") from error
    if "error" in found:
        failure = LaunchError(found["error"])
        failure.on_all_ranks = True
        raise failure
    return _world_of(found)


def leave(folder: Path, rank: int, size: int, wait_s: float) -> None:
    """Record that a rank has ended; the last one removes the folder.

    Args:
        wait_s: Wait at most this long until all ranks have ended.
    """
    deadline = time.monotonic() + wait_s
    with suppress(OSError):
        (folder / f"{_ENDED}{rank}").touch()
        for pause_s in _pauses():
            if len(list(folder.glob(f"{_ENDED}*"))) == size:
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists() or time.monotonic() >= deadline:
                return
            time.sleep(pause_s)


def _world_of(content: Mapping[str, Any]) -> World:
    entries = [Entry(**{**item, "cores": tuple(item["cores"])}) for item in content["entries"]]
    return World(entries, content["address"], content["port"], content.get("stop_at"))


def _make_world(
    folder: Path, size: int, environ: Mapping[str, str], prepare: Callable[[World], float | None]
) -> dict[str, Any]:
    """Return the world, or the reason why there is none; rank 0."""
    try:
        entries = _read_all(folder, [str(rank) for rank in range(size)])
        failed = next((rank for rank, entry in enumerate(entries) if entry["error"]), None)
        if failed is not None:
            return {"error": f"{entries[failed]['error']} (rank {failed} on {entries[failed]['host']})"}
        on_one_host = len({entry["host"] for entry in entries}) == 1
        given = environ.get("MASTER_ADDR")
        address = _checked(given) if given else _own_address(on_one_host, environ.get(NETWORK))
        content = {"entries": entries, "address": address, "port": _free_port(environ.get("MASTER_PORT"))}
        return {**content, "stop_at": prepare(_world_of(content))}
    except LaunchError as error:
        return {"error": str(error)}


def _read_all(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the content of files that other ranks write; waits for them.

    Raises:
        LaunchError: One has not been written in time.
    """
    contents: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + _MEETING_S
    for pause_s in _pauses():
        # On a network file system, opening the folder makes the client look for new files in it.
        with suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY))
        for name in names:
            if name not in contents:
                with suppress(OSError, ValueError):
                    contents[name] = json.loads((folder / name).read_text(encoding="utf-8"))
        missing = [name for name in names if name not in contents]
        if not missing:
            return [contents[name] for name in names]
        if time.monotonic() > deadline:
            break
        time.sleep(pause_s)
    who = "rank 0" if missing == [_WORLD] else f"rank{'s' * (len(missing) > 1)} {', '.join(missing[:8])}"
    raise LaunchError(
        f"{who} did not start within {_MEETING_S:.0f} s, or cannot write to {folder.parents[1]}; "
        "all hosts must share the run directory"
    )


def _pauses() -> Iterator[float]:
    pause_s = _SHORTEST_POLL_S
    while True:
        yield pause_s
        pause_s = min(_LONGEST_POLL_S, 1.5 * pause_s)


def _write(path: Path, content: Mapping[str, object]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, path)


def _checked(address: str) -> str:
    """Return the address that the user has set.

    Raises:
        LaunchError: It is not one of this host, so that no rank could connect.
    """
    for family, kind, *_, found in _addresses_of(address):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(found)
            return address
    raise LaunchError(
        f"MASTER_ADDR={address}: not an address of {socket.gethostname()}, the host of rank 0; unset it, and the right "
        "one is used"
    )


def _addresses_of(name: str) -> list[Any]:
    with suppress(OSError):
        return socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    return []


def _own_address(on_one_host: bool, network: str | None) -> str:
    """Return an address of this host that the other ranks can reach; a name if no such address is known."""
    if on_one_host:
        return "127.0.0.1"
    if network is not None and (address := address_in(network)) is not None:
        return address
    addresses = [str(sockaddr[0]) for *_, sockaddr in _addresses_of(socket.gethostname())]
    if outside := [address for address in addresses if not ipaddress.ip_address(address).is_loopback]:
        return outside[0]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; finds the address of the default route
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _free_port(given: str | None) -> int:
    """Return a free port of this host, or the one that the user has set.

    Raises:
        LaunchError: The user's port is not valid, or in use.
    """
    if given is None:
        return next(port for port in _candidates() if _is_free(port))
    if not given.isdigit() or not 0 < int(given) < 65_536:
        raise LaunchError(f"MASTER_PORT={given}: must be a number from 1 to 65535, or not set")
    if not _is_free(int(given)):
        raise LaunchError(
            f"MASTER_PORT={given}: the port is in use on {socket.gethostname()}; unset it, and a free one is chosen"
        )
    return int(given)


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
                return False  # else this host does not have the protocol
    return True
