"""How a process ends: others are told, and ended only after an exception."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mpitrain.backend import process_end  # noqa: E402

from ...simulators.simulated_mpi import Aborted, SimulatedMpi, simulate  # noqa: E402


class Group:
    """Counts its marks."""

    def __init__(self) -> None:
        self.marks = 0

    def mark_ended(self) -> None:
        self.marks += 1


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Callable[..., Any], int]]:
    """What is called at the end of the process, which has two ranks."""
    found: list[tuple[Callable[..., Any], int]] = []
    simulate(monkeypatch, (0, 0))
    monkeypatch.setattr(process_end, "_groups", weakref.WeakSet())
    monkeypatch.setattr(process_end, "_watched", False)
    monkeypatch.setattr(process_end, "_raised", False)
    monkeypatch.setattr(process_end, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(atexit, "register", lambda *call: found.append(call))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    return found


def test_the_end_is_watched_once_for_all_groups(registered: list[tuple[Callable[..., Any], int]]) -> None:
    groups: list[Any] = [Group() for _ in range(3)]
    for group in groups:
        process_end.watch(group)
    process_end.forget(groups[1])
    ((function, pid),) = registered
    function(pid)
    assert [group.marks for group in groups] == [1, 0, 1]


def test_an_exception_ends_the_other_ranks(registered: list[tuple[Callable[..., Any], int]]) -> None:
    shown: list[BaseException] = []
    sys.excepthook = lambda kind, error, trace: shown.append(error)
    group: Any = Group()
    process_end.watch(group)
    assert not process_end.is_raising()
    error = ValueError("no")
    sys.excepthook(ValueError, error, None)
    assert shown == [error] and process_end.is_raising()
    ((function, pid),) = registered
    with pytest.raises(Aborted) as aborted:
        function(pid)
    assert aborted.value.args == (1,) and group.marks == 1


def test_forked_processes_and_a_finalized_mpi_tell_nobody(
    registered: list[tuple[Callable[..., Any], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = Group()
    process_end.watch(group)
    sys.excepthook(ValueError, ValueError(), None)
    ((function, _),) = registered
    function(os.getpid() + 1)
    monkeypatch.setattr(SimulatedMpi, "Is_finalized", staticmethod(lambda: True))
    function(os.getpid())
    assert group.marks == 0


def test_a_rank_alone_does_not_abort(
    registered: list[tuple[Callable[..., Any], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_end.MPI.world, "size", 1)
    monkeypatch.setattr(SimulatedMpi, "COMM_WORLD", SimpleNamespace(size=1))
    process_end.watch(Group())  # type: ignore[arg-type]
    sys.excepthook(ValueError, ValueError(), None)
    ((function, pid),) = registered
    function(pid)


@pytest.mark.usefixtures("registered")
def test_the_error_is_printed_before_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Aborted):
        process_end.end_process(ValueError("ä reason"))
    assert "ä reason" in capsys.readouterr().err
