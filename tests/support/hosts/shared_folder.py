"""A network file system between the test hosts: SFTP, by sshfs, which caches folders like NFS."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..waiting import limit, wait_until
from .network import Hosts

SFTP = "/usr/lib/openssh/sftp-server"
_SERVER = f"""
import socket, subprocess
listening = socket.create_server(("", 2022))
while True:
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as sshd
    subprocess.Popen(["{SFTP}"], stdin=connection, stdout=connection)
"""


class SharedFolder:
    """A folder of one host that others have mounted.

    Attributes:
        served: The folder itself, which the processes of this machine see.
        mounted: Its path on the hosts that have mounted it.
    """

    def __init__(self, served: Path, mounted: Path) -> None:
        self.served, self.mounted = served, mounted
        self._mounts: dict[int, subprocess.Popen[bytes]] = {}

    def on(self, number: int, *words: object) -> list[str]:
        """Return the command line that runs ``words`` on a host that has mounted the folder."""
        inside = ["nsenter", "-t", self._mounts[number].pid, "-m", "-n", "unshare", "--uts"]
        return [*map(str, [*inside, "bash", "-c", f'hostname h{number}; exec "$@"', "-", *words])]


@contextmanager
def share(network: Hosts, folder: Path, server: int, clients: list[int]) -> Iterator[SharedFolder]:
    """Yield a folder in ``folder`` that a host serves and others have mounted; needs sshfs and openssh-sftp-server."""
    shared = SharedFolder(folder / "served", folder / "mounted")
    source = f"{network.net}.{server}:{shared.served}"
    words = ["sshfs", "-f", "-o", "directport=2022", "-o", "auto_unmount", source, str(shared.mounted)]

    def start(number: int, words: list[str]) -> subprocess.Popen[bytes]:
        on_host = ["ip", "netns", "exec", f"{network.prefix}{number}"]
        process = subprocess.Popen([*on_host, *words])
        started.append(process)
        return process

    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((f"{network.net}.{server}", 2022), 1.0):
            return True
        return False

    def is_mounted(mount: subprocess.Popen[bytes]) -> bool:
        return str(shared.mounted) in Path(f"/proc/{mount.pid}/mounts").read_text()

    for path in (shared.served, shared.mounted):
        path.mkdir()
    started: list[subprocess.Popen[bytes]] = []
    try:
        start(server, [sys.executable, "-c", _SERVER])
        wait_until(listens, "the server listens")
        for number in clients:
            mount = shared._mounts[number] = start(number, words)
            wait_until(lambda mount=mount: is_mounted(mount), "the folder is mounted", process=mount)  # type: ignore[misc]
        yield shared
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(limit(20))
