"""``mpitrain doctor --hosts`` checks all hosts at once, and lists what differs between them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from ..support.hosts.network import AGENT
from ..support.hosts.training import Hosts
from ..support.launch import ROOT, Mpi, run


@pytest.fixture
def further_interface(hosts: Hosts) -> Iterator[str]:
    """An interface that only the second host has."""
    words = ["ip", "-n", f"{hosts.network.prefix}2", "link"]
    subprocess.run([*words, "add", "further0", "type", "veth", "peer", "name", "further1"], check=True)
    for end in ("further0", "further1"):
        subprocess.run([*words, "set", end, "up"], check=True)
    yield "further0"
    subprocess.run([*words, "del", "further0"], check=True)


def test_differences_and_hosts_that_do_not_answer(hosts: Hosts, further_interface: str, mpi: Mpi) -> None:
    network = hosts.network
    start = [*network.on_first(), str(mpi.python), "-m", "mpitrain", "doctor", "--json", "--remote-agent", str(AGENT)]
    names = [f"{network.net}.{number}" for number in (1, 2, 3, 99)]
    words = [*start, "--hosts", ",".join(names), "--network", f"{network.net}.0/24"]
    done = run(words, env={**os.environ, **network.environment}, cwd=ROOT, timeout=150)
    findings = {(each["topic"], each["check"]): each for each in json.loads(done.stdout)}
    assert findings["Hosts", f"host {names[3]}"]["verdict"] == "failure" and done.returncode == 1
    assert findings["Hosts", "interfaces"]["verdict"] == "warning"
    assert further_interface in findings["Hosts", "interfaces"]["found"].partition(" on h2")[0]
    assert {check for topic, check in findings if topic == "Ranks" and check.startswith("host ")} == {
        "host h1",
        "host h2",
        "host h3",
    }
    assert ("Hosts", "kernel") not in findings  # only differences
