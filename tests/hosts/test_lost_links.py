"""A link between hosts that is lost, for a short time or permanently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.hosts.runs import Run
from ..support.hosts.training import Hosts
from ..support.launch import Mpi
from ..support.waiting import limit, wait_until


@pytest.fixture
def run(hosts: Hosts, openmpi: Mpi, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """A run on three hosts; the link of host h2 is restored after the test."""
    started = Run(hosts, openmpi, tmp_path, *request.param)
    yield started
    hosts.network.set_link(2, "up")
    started.process.kill()
    started.process.wait(timeout=limit(20))
    for number in (1, 2, 3):
        hosts.network.kill(number)
    wait_until(lambda: hosts.network.is_reachable(2), "the bridge forwards again")


@pytest.mark.parametrize("run", [("--link-timeout", "12")], indirect=True)
def test_a_lost_link_ends_the_run_on_all_hosts(run: Run) -> None:
    run.wait_for_checkpoint()
    run.network.set_link(2, "down")
    status, _, err = run.end()
    assert status == 1
    host = f"host {run.network.net}.2"
    assert [host in line for line in err if "answer" in line] == [True, True], err
    # With remaining session folders, a later daemon with the same process id would not start.
    assert [run.network.sessions(number) for number in (1, 2, 3)] == [[], [], []]


@pytest.mark.parametrize("run", [("--link-timeout", "30")], indirect=True)
def test_training_continues_when_the_link_returns(run: Run) -> None:
    run.wait_for_checkpoint()
    run.network.set_link(2, "down")
    run.wait_until(lambda: "has not answered" in run.errors)
    run.network.set_link(2, "up")
    before = max(status.step for status in run.wait_for_ranks())
    run.wait_for_ranks(step=before + 100)
    run.process.terminate()
    status, _, err = run.end()
    assert status == 75
    assert [line for line in err if "has not answered" in line] and [line for line in err if "answers again" in line]
