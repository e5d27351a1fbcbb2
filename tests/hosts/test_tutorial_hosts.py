"""The chapter of the tutorial about several hosts."""

from __future__ import annotations

import shlex
from pathlib import Path

from ..support.hosts.network import AGENT
from ..support.hosts.training import Hosts
from ..support.pages import Page, tutorial


def test_several_hosts(hosts: Hosts, tmp_path: Path) -> None:
    network = hosts.network
    starter = shlex.join([*network.on_first(), str(network.python), "-m", "mpitrain", "run"])
    flags = f"--remote-agent {AGENT} --network {network.net}.0/24"
    # The page's eight seconds and 20,000 steps are meant for an idle machine: here, the rank is killed when it trains.
    trained = "for i in $(seq 600); do grep -qs loss runs/killed/metrics.jsonl && break; sleep 0.1; done"
    paces = {"sleep 8": trained, "--train-steps 20000": "--train-steps 6000"}

    def prepare(command: str) -> str:
        for number in (1, 2):
            command = command.replace(f"node{number}", f"{network.net}.{number}")
        for pace, ours in paces.items():
            command = command.replace(pace, ours)
        return command.replace("mpitrain run", f"{starter} {flags}").replace("digits.py", "digits.py --threads 1")

    Page(tutorial("first_run"), tmp_path).write_files()
    assert Page(tutorial("several_hosts"), tmp_path, network.environment, prepare).execute() == 2
