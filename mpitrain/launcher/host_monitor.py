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
from typing import Any

from ..process import host_watcher
from .hosts import RemoteAgent

REPORT_S = 10.0  # time without an answer before a host is reported
_BEAT_S = 0.5
_LONGEST_LOOK_S = 1.0  # a longer pause means that this process was suspended; that time does not count
_LATER_S = 5.0  # time until a lost host ends its ranks, after this process has reported it
_AGAIN_S = 2.0  # pause before a watcher that has ended is started again


class HostMonitor:
    """Exchanges heartbeats with a watcher on every other host. A host that has never answered does not count as lost.

    Args:
        hosts: The other hosts.
        timeout_s: Seconds without an answer after which a host is lost. The watcher on a lost host ends the host's
            ranks 5 s later.
    """

    def __init__(self, agent: RemoteAgent, hosts: Sequence[str], run_dir: Path, timeout_s: float) -> None:
        self._agent, self._timeout_s, self._token = agent, timeout_s, secrets.token_hex(8)
        self._words = [self._token, str(run_dir), str(timeout_s + _LATER_S)]
        self._silent_s = dict.fromkeys(hosts, 0.0)
        self._answered: set[str] = set()
        self._reported: set[str] = set()
        self._looked_at = time.monotonic()
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(host,), daemon=True) for host in hosts]
        for thread in self._threads:
            thread.start()

    def look(self) -> list[str]:
        """Return messages about hosts that stopped answering, or answer again, since the last call. Call this often."""
        now = time.monotonic()
        elapsed_s, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        lines = []
        for host in self._silent_s:
            self._silent_s[host] += elapsed_s
            silent_s = self._silent_s[host]
            if host in self._reported and silent_s < REPORT_S / 2:
                self._reported.discard(host)
                lines.append(f"host {host} answers again")
            elif host not in self._reported and silent_s >= min(REPORT_S, self._timeout_s):
                self._reported.add(host)
                then = f"it counts as lost after {self._timeout_s:g} s"
                then = then if host in self._answered else "its link is not monitored"
                lines.append(f"host {host} has not answered heartbeats for {silent_s:.0f} s; {then}")
        return lines

    def lost(self) -> list[str]:
        """Return the hosts that have not answered for ``timeout_s``."""
        return [host for host in self._answered if self._silent_s[host] >= self._timeout_s]

    def close(self) -> None:
        """End the watchers."""
        self._ending.set()
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _watch(self, host: str) -> None:
        """Exchange heartbeats with one host until ``close``; runs in a thread."""
        while not self._ending.is_set():
            try:
                address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
            except OSError:
                return  # the launcher reports the error
            command = shlex.join([sys.executable, host_watcher.__file__, str(address[4][0]), *self._words])
            watcher = self._agent.start(host, command)
            if watcher is None:
                return
            try:
                self._exchange(host, address, watcher)
            finally:
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    assert watcher.stdin is not None
                    watcher.stdin.close()
                    watcher.wait(timeout=1)
                watcher.kill()
                watcher.wait()
            self._ending.wait(_AGAIN_S)  # the agent's connection has ended, or the host is lost

    def _exchange(self, host: str, address: tuple[Any, ...], watcher: subprocess.Popen[bytes]) -> None:
        """Exchange heartbeats until the watcher ends, or until ``close``."""
        assert watcher.stdout is not None
        family, kind, protocol, _, target = address
        port = next((int(line) for line in watcher.stdout if line.strip().isdigit()), None)  # after a login banner
        if port is None:
            return
        with socket.socket(family, kind, protocol) as beats:
            beats.settimeout(_BEAT_S)
            while not self._ending.is_set() and watcher.poll() is None:
                began = time.monotonic()
                with contextlib.suppress(OSError):  # no route, or no answer in time
                    beats.sendto(self._token.encode(), (target[0], port, *target[2:]))
                    if beats.recvfrom(512)[0] == self._token.encode():
                        self._silent_s[host] = 0.0
                        self._answered.add(host)
                self._ending.wait(max(0.0, began + _BEAT_S - time.monotonic()))
