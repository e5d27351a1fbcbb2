"""Open operations of a program: names, numbers, and what happens to them at an error."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mpitrain.errors import HorovodInternalError  # noqa: E402
from mpitrain.horovod.request import Handle, ReduceOp, Request  # noqa: E402
from mpitrain.horovod.submissions import Submissions  # noqa: E402
from mpitrain.horovod.timeline import Timeline  # noqa: E402


def handle(name: str = "", kind: str = "allreduce") -> Handle:
    return Handle(Request(kind, name, torch.float32, ((2,),), ReduceOp.Sum))


def test_a_name_is_open_until_its_operation_ends() -> None:
    submissions = Submissions(Timeline())
    first = submissions.add(handle("a"))
    with pytest.raises(ValueError, match="'a'"):
        submissions.add(handle("a"))
    assert [*submissions.queue] == [first]  # the refused operation is not announced
    other = submissions.add(handle("a", "broadcast"))  # names of each kind are separate
    assert submissions.find(first.key) is first and submissions
    submissions.end(first, [1])
    assert first.done and first.result == [1] and first.error is None
    assert submissions.find(first.key) is None
    submissions.add(handle("a"))
    submissions.end(other, None)
    submissions.end(None, None)  # this rank has joined


def test_operations_without_a_name_are_numbered() -> None:
    submissions = Submissions(Timeline())
    handles = [submissions.add(handle()) for _ in range(3)]
    assert [one.key for one in handles] == [("allreduce", "", number) for number in (1, 2, 3)]
    submissions.end(handles[0], None)
    submissions.number = 1 << 30  # the largest number, which fits into a word of an announcement
    assert submissions.add(handle()).key[-1] == 1


def test_an_error_ends_all_operations_and_refuses_later_ones() -> None:
    submissions = Submissions(Timeline())
    handles = [submissions.add(handle()), submissions.add(handle("a")), submissions.add(handle(kind="join"))]
    assert submissions.waiting() == handles[:2]  # join may wait for a long time
    error = HorovodInternalError("gone")
    submissions.end_all(error)
    assert all(one.done and one.error is error for one in handles)
    assert not submissions and not submissions.queue
    with pytest.raises(HorovodInternalError, match="gone"):
        submissions.add(handle("b"))
