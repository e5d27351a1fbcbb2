"""The backend of torch.distributed on several hosts."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from ..support.hosts.training import Hosts
from ..support.launch import PROGRAMS, missing, run


@pytest.fixture(autouse=True)
def _torch() -> None:
    if importlib.util.find_spec("torch") is None:
        missing("torch")


def on_hosts(hosts: Hosts, ranks: list[int], *words: str) -> tuple[int, list[dict[str, object]], str]:
    """Run a program of the backend; return its status, the lines of JSON that it printed, and its errors."""
    python = str(hosts.network.python)
    done = run(hosts.network.launch(ranks, [python, "-W", "ignore", *words]), timeout=90, env=hosts.network.environment)
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, printed, done.stderr


def test_operations_on_hosts_with_unequal_numbers_of_ranks(hosts: Hosts) -> None:
    status, printed, errors = on_hosts(hosts, [2, 1], str(PROGRAMS / "backend_collectives.py"))
    assert status == 0, errors
    assert printed[0]["checks"] > 500


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("other_shape", r"nodes have called different operations: node 0: all_reduce sum float32 \(3,\); node 1: "),
        ("absent_rank", r"operation 1, all_reduce.*rank 1 did not join"),
    ],
)
def test_mistakes(hosts: Hosts, mistake: str, named: str) -> None:
    status, printed, errors = on_hosts(hosts, [1, 1], str(PROGRAMS / "backend_mistakes.py"), mistake)
    assert status != 0
    assert printed, errors
    assert all(re.search(named, str(line["text"])) for line in printed), printed
