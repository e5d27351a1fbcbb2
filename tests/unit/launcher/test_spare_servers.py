"""Fork servers on spare hosts: when they are started, with what, and how they end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from mpitrain.launcher.hosts import RemoteAgent
from mpitrain.launcher.spare_servers import SpareServers
from mpitrain.process import rank_status

from ...support.waiting import wait_until


class Agent(RemoteAgent):
    """Starts a process that ends with its input."""

    def __init__(self) -> None:
        self.commands: dict[str, str] = {}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, host: str, command: str) -> subprocess.Popen[bytes] | None:
        self.commands[host] = command
        if host == "gone":
            return None
        self.processes.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return self.processes[-1]


def test_servers_start_when_ranks_train_and_end_with_the_run(tmp_path: Path) -> None:
    agent = Agent()
    servers = SpareServers(agent, ["c", "gone", "d"], tmp_path, {"PYTHONPATH": "/of/run", "TOKEN": "secret"})
    assert not agent.commands
    rank_status.register_program(tmp_path, 0, os.getpid(), os.getppid())
    wait_until(lambda: len(agent.commands) == 3, "no start", 30)
    assert all("PYTHONPATH=/of/run" in command and "secret" not in command for command in agent.commands.values())
    servers.close()
    assert [process.returncode for process in agent.processes] == [0, 0]


def test_no_server_starts_if_no_rank_trains(tmp_path: Path) -> None:
    agent = Agent()
    SpareServers(agent, ["c"], tmp_path, {}).close()
    assert not agent.commands
