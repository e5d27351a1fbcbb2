"""How the ranks of a program find each other before it starts: a table of the ranks, and an address for rank 0.

The ranks cannot use MPI for this, because the program may start MPI itself. They use the run directory, which all hosts
share. Each rank writes its entry. Rank 0 reads all entries and writes the world, for which the other ranks wait.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core.cpus import Binding, all_cores, share_of
from ..core.files import replace_file
from ..core.words import numbered
from ..errors import LaunchError
from .address import choose_address, choose_port

_WORLD, _FAILED = "world", "failed"  # names of files
_ENDED, _ENDING = "ended-", "ending-"  # beginnings of names that end with a rank
_MEETING_S = 300.0
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.002, 0.2


@dataclass(frozen=True)
class Entry:
    """The entry of one rank.

    Attributes:
        host: The name of the rank's host.
        binding: Where the rank may run.
        devices: The rank's ``CUDA_VISIBLE_DEVICES``; None if not set.
        error: Why the rank cannot start the program; empty if it can.
    """

    host: str
    binding: Binding
    devices: str | None = None
    error: str = ""


@dataclass(frozen=True)
class World:
    """All ranks of a program.

    Attributes:
        entries: The entries of the ranks, in rank order.
        address, port: The address and port at which rank 0 accepts connections of the other ranks.
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
        """Return a rank's number of cores: its share of the host's cores, at most those to which it is bound."""
        ranks = self.ranks_on(self.entries[rank].host)
        cores = all_cores(self.entries[other].binding.cores for other in ranks)
        return share_of(cores, len(ranks), self.entries[rank].binding.cores)


def own_entry(environ: Mapping[str, str], error: str) -> Entry:
    """Return the entry of this process."""
    return Entry(socket.gethostname(), Binding.own(), environ.get("CUDA_VISIBLE_DEVICES"), error)


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
        environ: The environment, with ``MASTER_ADDR`` and ``MASTER_PORT`` if the user has set them.
        prepare: Called on rank 0, before the other ranks continue; returns ``stop_at``.

    Raises:
        LaunchError: On every rank: a rank cannot start the program or has not started in time, the user's address or
            port is not valid, or ``prepare`` has failed. Or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / str(rank), json.dumps(asdict(entry)).encode())
        if rank == 0:
            replace_file(folder / _WORLD, json.dumps(_make_world(folder, size, environ, prepare)).encode())
        (content,) = _read_all(folder, [_WORLD])
    except OSError as error:
        raise LaunchError(f"the run directory {folder.parents[1]} cannot be written: {error.strerror}") from error
    if "error" in content:
        raise LaunchError(content["error"], on_all_ranks=True)
    return _world_of(content)


def leave(folder: Path, rank: int, size: int, failed: bool, wait_s: float) -> None:
    """Record that a rank has ended; the last rank removes the folder.

    Args:
        wait_s: Maximum number of seconds to wait until all ranks have ended.
    """
    deadline = time.monotonic() + wait_s
    with suppress(OSError):
        if failed:
            (folder / _FAILED).touch()
        (folder / f"{_ENDED}{rank}").touch()
        for pause_s in _pauses():
            if len(list(folder.glob(f"{_ENDED}*"))) == size:
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists() or time.monotonic() >= deadline:
                return
            time.sleep(pause_s)


def mark_ending(folder: Path, rank: int) -> None:
    """Record that the program of a rank is ending."""
    with suppress(OSError):
        (folder / f"{_ENDING}{rank}").touch()


def working_ranks(folder: Path, size: int) -> list[int]:
    """Return the ranks whose program has neither ended nor is ending; none after the last rank has left."""
    with suppress(FileNotFoundError):
        ending = {name.rpartition("-")[2] for name in os.listdir(folder) if name.startswith((_ENDED, _ENDING))}
        return [rank for rank in range(size) if str(rank) not in ending]
    return []


def any_failed(folder: Path) -> bool:
    """Return whether a rank of this launch has failed."""
    return (folder / _FAILED).exists()


def _world_of(content: Mapping[str, Any]) -> World:
    entries = [Entry(**{**item, "binding": Binding(**item["binding"])}) for item in content["entries"]]
    return World(entries, content["address"], content["port"], content.get("stop_at"))


def _make_world(
    folder: Path, size: int, environ: Mapping[str, str], prepare: Callable[[World], float | None]
) -> dict[str, Any]:
    """Return the world, or the reason why there is none; called on rank 0."""
    try:
        entries = _read_all(folder, [str(rank) for rank in range(size)])
        failed = next((rank for rank, entry in enumerate(entries) if entry["error"]), None)
        if failed is not None:
            return {"error": f"{entries[failed]['error']} (rank {failed} on {entries[failed]['host']})"}
        on_one_host = len({entry["host"] for entry in entries}) == 1
        address, port = choose_address(environ, on_one_host), choose_port(environ)
        content = {"entries": entries, "address": address, "port": port}
        return {**content, "stop_at": prepare(_world_of(content))}
    except LaunchError as error:
        return {"error": str(error)}


def _read_all(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the content of files that other ranks write; waits for them.

    Raises:
        LaunchError: A file has not been written in time.
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
    who = "rank 0" if missing == [_WORLD] else numbered("rank", missing)
    raise LaunchError(
        f"{who} did not start within {_MEETING_S:.0f} s, or cannot write to {folder.parents[1]}; "
        "all hosts must share the run directory"
    )


def _pauses() -> Iterator[float]:
    pause_s = _SHORTEST_POLL_S
    while True:
        yield pause_s
        pause_s = min(_LONGEST_POLL_S, 1.5 * pause_s)
