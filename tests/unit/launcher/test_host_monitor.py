"""Heartbeats between hosts: which hosts are reported, and which count as lost, by a clock that the test moves."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.launcher import host_monitor
from mpitrain.launcher.host_monitor import HostMonitor

from ...support.waiting import wait_until

ANSWERS, SILENT = "127.0.0.1", "127.0.0.2"
TIMEOUT_S = 15.0


class Clock:
    """The time of the monitor."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Agent:
    """Starts watchers that are threads of this process: one answers heartbeats, the others do not start."""

    def __init__(self) -> None:
        self.is_answering, self.answers, self.ignored = True, 0, 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((ANSWERS, 0))
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def start(self, host: str, command: str) -> Any:
        if host != ANSWERS:
            return None
        ended = SimpleNamespace(close=lambda: None)
        port = f"{self._socket.getsockname()[1]}\n".encode()
        return SimpleNamespace(
            stdin=ended,
            stdout=iter([b"Welcome to this host\n", port]),
            poll=lambda: None,
            wait=lambda timeout=None: 0,
            kill=lambda: None,
        )

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        while (received := self._socket.recvfrom(512))[0]:
            if self.is_answering:
                self._socket.sendto(*received)
                self.answers += 1
            else:
                self.ignored += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(host_monitor, "time", clock)
    monkeypatch.setattr(host_monitor, "_BEAT_S", 0.2)
    return clock


@pytest.fixture
def agent() -> Iterator[Agent]:
    with contextlib.closing(Agent()) as agent:
        yield agent


def wait_for_answers(agent: Agent) -> None:
    """Wait until the monitor has taken an answer that is sent from now on: then it sends the next heartbeat."""
    before = agent.answers
    wait_until(lambda: agent.answers >= before + 2, "answers")


def stop_answers(agent: Agent) -> None:
    """Answer no more, and wait until the monitor has taken all answers."""
    agent.is_answering = False
    before = agent.ignored
    wait_until(lambda: agent.ignored >= before + 2, "heartbeats")


def looks(monitor: HostMonitor, clock: Clock, seconds: int) -> list[tuple[int, str]]:
    """Look once a second; return for each message after how many seconds it came, and the host that it names."""
    named = []
    for second in range(1, seconds + 1):
        clock.now += 1
        for line in monitor.look():
            (host,) = (host for host in (ANSWERS, SILENT) if f"host {host} " in line)
            named.append((second, host))
    return named


def test_a_host_is_lost_only_if_it_has_answered_before(clock: Clock, agent: Agent, tmp_path: Path) -> None:
    with contextlib.closing(HostMonitor(agent, [ANSWERS, SILENT], tmp_path, TIMEOUT_S)) as monitor:  # type: ignore[arg-type]
        wait_for_answers(agent)
        stop_answers(agent)
        assert looks(monitor, clock, 9) == [] and monitor.lost() == []
        assert sorted(looks(monitor, clock, 5)) == [(1, ANSWERS), (1, SILENT)], "after 10 s, and once"
        assert monitor.lost() == []
        looks(monitor, clock, 1)
        assert monitor.lost() == [ANSWERS]
        assert looks(monitor, clock, 20) == [] and monitor.lost() == [ANSWERS]


def test_a_host_that_answers_again_is_not_lost(clock: Clock, agent: Agent, tmp_path: Path) -> None:
    with contextlib.closing(HostMonitor(agent, [ANSWERS], tmp_path, TIMEOUT_S)) as monitor:  # type: ignore[arg-type]
        wait_for_answers(agent)
        stop_answers(agent)
        assert looks(monitor, clock, 14) == [(10, ANSWERS)]
        agent.is_answering = True
        wait_for_answers(agent)
        assert looks(monitor, clock, 4) == [(1, ANSWERS)]
        assert monitor.lost() == []


def test_the_time_in_which_the_monitor_was_suspended_does_not_count(clock: Clock, agent: Agent, tmp_path: Path) -> None:
    with contextlib.closing(HostMonitor(agent, [ANSWERS], tmp_path, TIMEOUT_S)) as monitor:  # type: ignore[arg-type]
        wait_for_answers(agent)
        stop_answers(agent)
        clock.now += 3600
        assert monitor.look() == [] and monitor.lost() == []
