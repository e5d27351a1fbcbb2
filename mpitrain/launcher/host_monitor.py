"""Detect lost hosts: on a power or network failure no connection closes, and the other ranks would wait forever."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ..process import host_watcher
from .hosts import RemoteAgent

_BEAT_S = 0.5
_LATER_S = 5.0  # until a lost host ends its ranks, after this process has reported it
REPORT_S = 10.0  # without an answer, before a host is reported


class HostMonitor:
    """Exchanges heartbeats with a watcher on every other host. A host that has never answered is not judged.

    Args:
        hosts: The other hosts.
        timeout_s: Seconds without an answer after which a host is lost, and its watcher ends its ranks.
    """

    def __init__(self, agent: RemoteAgent, hosts: Sequence[str], run_dir: Path, timeout_s: float) -> None:
        self._timeout_s, self._token = timeout_s, secrets.token_hex(8)
        self._answered_at: dict[str, float] = {}
        self._reported: set[str] = set()
        self._ending = threading.Event()
        words = [self._token, str(run_dir), str(timeout_s + _LATER_S)]
        self._watchers = {
            host: agent.start(host, shlex.join([sys.executable, host_watcher.__file__, host, *words])) for host in hosts
        }
        self._threads = [threading.Thread(target=self._exchange, args=(host,), daemon=True) for host in hosts]
        for thread in self._threads:
            thread.start()

    def silent(self, now: float) -> dict[str, float]:
        """Return the hosts that have not answered for a while, with the seconds since their last answer."""
        return {host: now - at for host, at in list(self._answered_at.items()) if now - at > 4 * _BEAT_S}

    def lost(self, now: float) -> list[str]:
        """Return the hosts that have not answered for ``timeout_s``."""
        return [host for host, silent_s in self.silent(now).items() if silent_s >= self._timeout_s]

    def news(self, now: float) -> list[str]:
        """Return messages about hosts that stopped answering, or answer again, since the last call."""
        silent = self.silent(now)
        lines = []
        for host, silent_s in silent.items():
            if silent_s >= min(REPORT_S, self._timeout_s) and host not in self._reported:
                self._reported.add(host)
                lines.append(
                    f"host {host} has not answered for {silent_s:.0f} s; it counts as lost after {self._timeout_s:g} s"
                )
        for host in self._reported - set(silent):
            self._reported.discard(host)
            lines.append(f"host {host} answers again")
        return lines

    def close(self) -> None:
        """End the watchers."""
        self._ending.set()
        for watcher in self._watchers.values():
            if watcher is not None:
                with contextlib.suppress(OSError):
                    watcher.stdin.close()  # type: ignore[union-attr]
        for watcher in self._watchers.values():
            if watcher is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    watcher.wait(timeout=1)
                watcher.kill()
                watcher.wait()

    def _exchange(self, host: str) -> None:
        """Exchange heartbeats with one host; runs in a thread."""
        watcher = self._watchers[host]
        line = b"" if watcher is None or watcher.stdout is None else watcher.stdout.readline()
        if not line.strip().isdigit():
            return  # the launcher will report a host that cannot be reached
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(host, int(line), type=socket.SOCK_DGRAM)[0]
        except OSError:
            return
        with socket.socket(family, kind, protocol) as beats:
            beats.settimeout(_BEAT_S)
            while not self._ending.is_set():
                began = time.monotonic()
                with contextlib.suppress(OSError):  # no route, or no answer in time
                    beats.sendto(self._token.encode(), target)
                    if beats.recvfrom(512)[0] == self._token.encode():
                        self._answered_at[host] = time.monotonic()
                self._ending.wait(max(0.0, began + _BEAT_S - time.monotonic()))
