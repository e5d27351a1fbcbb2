"""Messages between two simulated ranks: parts, sizes, timeouts and ends of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mpitrain.backend.host_tensors import to_host  # noqa: E402
from mpitrain.backend.internode import messages_of  # noqa: E402
from mpitrain.backend.point_to_point import Message  # noqa: E402
from mpitrain.errors import CollectiveFailed  # noqa: E402

from ...simulators.simulated_mpi import World, simulate  # noqa: E402
from ...support.simulated_groups import make_small  # noqa: E402


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    make_small(monkeypatch)
    return simulate(monkeypatch, (0, 0))


def send(world: World, tensor: Any, tag: int = 0) -> Message:
    flat = to_host(tensor)
    requests: Any = [world.comm(0).Isend(part, 1, tag) for part in messages_of(flat)]
    return Message("send", requests, tensor, flat, None, 60.0, lambda: False)


def receive(
    world: World, tensor: Any, tag: int = 0, timeout_s: float = 60.0, has_ended: Callable[[], bool] = lambda: False
) -> Message:
    flat = to_host(tensor, reads=False)
    parts = messages_of(flat)
    requests: Any = [world.comm(1).Irecv(part, 0, tag) for part in parts]
    return Message("recv from rank 0", requests, tensor, flat, parts[-1][0].nbytes, timeout_s, has_ended)


@pytest.mark.parametrize("n", [0, 1, 96, 250])
def test_a_message_in_parts(world: World, n: int) -> None:
    sent, received = torch.randn(n, 2), torch.zeros(2, n).t()
    out = receive(world, received)
    own = send(world, sent)
    assert out.is_completed() and out.wait() and own.wait() and own.is_success()
    assert torch.equal(received, sent) and out.source_rank() == 0
    assert out.result()[0] is received and own.source_rank() == -1


def test_messages_with_tags_may_arrive_in_any_order(world: World) -> None:
    outs = [torch.zeros(1) for _ in range(2)]
    received = [receive(world, out, tag) for tag, out in enumerate(outs)]
    send(world, torch.tensor([5.0]), 1)
    assert [message.is_completed() for message in received] == [False, True]
    send(world, torch.tensor([4.0]), 0)
    assert received[0].wait() and [out.item() for out in outs] == [4, 5]


@pytest.mark.parametrize("n", [1, 3])
def test_a_message_of_another_size_is_an_error(world: World, n: int) -> None:
    out = torch.zeros(2)
    message = receive(world, out)
    send(world, torch.ones(n))
    assert message.is_completed() and not message.is_success()
    with pytest.raises(CollectiveFailed, match=r"8|truncated"):
        message.wait()


def test_a_message_that_does_not_come(world: World) -> None:
    message = receive(world, torch.zeros(1), timeout_s=-math.inf)
    with pytest.raises(CollectiveFailed, match="rank 0"):
        message.wait()
    assert message.is_completed()
    with pytest.raises(CollectiveFailed):
        receive(world, torch.zeros(1)).wait(timedelta(microseconds=1))


def test_the_other_rank_has_ended(world: World) -> None:
    message = receive(world, torch.zeros(1), has_ended=lambda: True)
    message._look()
    assert not message.done, "a message may still be under way"
    message._looked = -1.0
    first = receive(world, torch.zeros(1), 1, has_ended=lambda: True)
    first._looked = -1.0
    message._look()
    assert isinstance(message.exception(), CollectiveFailed)
    send(world, torch.ones(1), 1)
    first._look()
    assert first.is_success(), "a message that has arrived is no error"


def test_a_future_is_complete_although_nobody_waits(world: World) -> None:
    out = torch.zeros(1)
    future = receive(world, out).get_future()
    send(world, torch.ones(1))
    assert future.wait()[0] is out and out.item() == 1
