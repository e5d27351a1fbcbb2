"""A live run that is to continue on other hosts; attempts are simulated, and no process starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.launcher import supervisor
from mpitrain.launcher.attempt import AttemptResult
from mpitrain.launcher.mpi_launcher import LaunchSpec, LocalMachine
from mpitrain.launcher.open_mpi import OpenMpi
from mpitrain.launcher.scaling import ScaleRequest
from mpitrain.plan.launch_options import LaunchOptions
from mpitrain.plan.request import JobRequest, LaunchRequest
from mpitrain.process.signals import STOPPED_EARLY

HOST = "198.51.100.1"
Accepts = Callable[[ScaleRequest], bool]


def ended(status: int) -> AttemptResult:
    return AttemptResult(
        pid=1,
        status=status,
        output="",
        filtered_output="",
        ended_at=0.0,
        statuses=(),
        tracebacks={},
        lost_hosts=(),
        is_reported=False,
        unreachable={},
    )


@pytest.fixture
def supervise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[int]]]:
    """Returns the exit status of a run of two ranks, and the numbers of ranks of its attempts."""

    def run(unreachable: Mapping[str, str], *attempts: Callable[[Accepts], AttemptResult]) -> tuple[int, list[int]]:
        started: list[int] = []
        left = iter(attempts)

        def attempt(**fields: Any) -> Any:
            started.append(fields["ranks"])
            return SimpleNamespace(run=lambda: next(left)(fields["accepts"]))

        silent = SimpleNamespace(was_read=False, poll=lambda: None, restore=lambda: None)
        machine = LocalMachine(4, False, {"PATH": "/bin"})
        monkeypatch.setattr(supervisor, "Attempt", attempt)
        monkeypatch.setattr(supervisor, "StandardInput", lambda: silent)
        monkeypatch.setattr(supervisor, "StreamServer", lambda *arguments: SimpleNamespace(description=""))
        monkeypatch.setattr(supervisor, "prepare", lambda request: (machine, OpenMpi("mpirun", 5), LaunchSpec(2)))
        monkeypatch.setattr(supervisor.RemoteAgent, "unreachable", lambda agent, hosts: unreachable)
        request = LaunchRequest(LaunchOptions(ranks=2), JobRequest(Path("job.py"), {"run_dir": tmp_path}))
        status = supervisor.run(request)
        assert next(left, None) is None
        return status, started

    return run


def asked(is_accepted: bool, **request: Any) -> Callable[[Accepts], AttemptResult]:
    """Return an attempt in which the run gets a request, and after which it has stopped before its last step."""

    def attempt(accepts: Accepts) -> AttemptResult:
        assert accepts(ScaleRequest(**request)) is is_accepted
        return ended(STOPPED_EARLY)

    return attempt


def test_an_accepted_request_continues_on_its_ranks(supervise: Callable[..., tuple[int, list[int]]]) -> None:
    attempts = asked(True, hosts=f"{HOST}:1"), asked(True, ranks=1), lambda accepts: ended(0)
    assert supervise({}, *attempts) == (0, [2, 1, 1])


@pytest.mark.parametrize("request_", [{"hosts": f"{HOST}:1"}, {"hosts": f"{HOST}:2", "ranks": 5}], ids=str)
def test_a_refused_request_has_no_effect(
    supervise: Callable[..., tuple[int, list[int]]], request_: dict[str, Any]
) -> None:
    """When the ranks stop later for another reason, the run ends."""
    assert supervise({HOST: "no answer"}, asked(False, **request_)) == (STOPPED_EARLY, [2])
