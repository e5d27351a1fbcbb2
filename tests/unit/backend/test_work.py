"""Handles of operations: their end, their future, and their error."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from mpitrain.backend import work as module  # noqa: E402
from mpitrain.backend.work import TensorWork  # noqa: E402


class Waiting(TensorWork):
    """Counts the calls."""

    def __init__(self) -> None:
        super().__init__([torch.ones(2)], threading.RLock())
        self.waits = self.later = 0

    def wait(self, timeout: object = None) -> bool:
        self.waits += 1
        return True

    def _end_later(self) -> None:
        self.later += 1


def test_a_future_has_the_tensors_when_the_work_has_ended() -> None:
    work = Waiting()
    future = work.get_future()
    assert work.get_future() is future and work.later == 1 and not future.done() and not work.is_success()
    work.end()
    assert future.done() and future.value() is work.outputs is work.result()
    assert work.is_success() and work.exception() is None


def test_a_future_of_work_that_has_ended_is_complete() -> None:
    work = Waiting()
    work.end()
    assert work.get_future().done() and work.later == 0


@pytest.mark.parametrize("ends_first", [False, True])
def test_an_error_ends_the_process_only_if_there_is_a_future(monkeypatch: pytest.MonkeyPatch, ends_first: bool) -> None:
    reported: list[Exception] = []

    def end_process(error: Exception) -> None:
        reported.append(error)
        raise SystemExit

    monkeypatch.setattr(module, "end_process", end_process)
    work, error = Waiting(), ValueError("no")
    if ends_first:
        work.end(error)
        assert work.done and not work.is_success() and work.exception() is error and not reported
        with pytest.raises(SystemExit):
            work.get_future()
    else:
        work.get_future()
        with pytest.raises(SystemExit):
            work.end(error)
    assert reported == [error]


def test_synchronize_waits() -> None:
    work = Waiting()
    work.synchronize()
    assert work.waits == 1
