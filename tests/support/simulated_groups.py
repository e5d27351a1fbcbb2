"""Process groups of the backend whose ranks are simulated; blocks and messages are small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from mpitrain.backend import collectives, internode, process_end, staging
from mpitrain.backend.members import Members, members_of

from ..simulators.simulated_mpi import World, interleave, simulate

BLOCK_BYTES, DIVIDED_BYTES, MESSAGE_BYTES, EXCHANGED_BYTES = 512, 256, 384, 256
TOPOLOGIES = [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 0, 1), (0, 1, 0, 2, 1)]


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors take several blocks and messages, and nothing watch the end of this process."""
    monkeypatch.setattr(process_end, "_watched", True)
    monkeypatch.setattr(staging, "block_bytes", lambda size: BLOCK_BYTES)
    monkeypatch.setattr(collectives, "_DIVIDED_BYTES", DIVIDED_BYTES)
    for module in (collectives, internode):
        monkeypatch.setattr(module, "MESSAGE_BYTES", MESSAGE_BYTES)
    monkeypatch.setattr(internode, "_EXCHANGED_BYTES", EXCHANGED_BYTES)
    monkeypatch.setattr(internode, "_BLOCK_BYTES", 128)


def make_members(monkeypatch: pytest.MonkeyPatch, node_of: Sequence[int]) -> list[Members]:
    """Return a process group, as each of its ranks sees it."""
    make_small(monkeypatch)
    world: World = simulate(monkeypatch, node_of)
    return world.run(lambda comm: members_of(comm, "group"))


def is_met(members: Members, condition: Any) -> bool:
    """Return whether a rank can continue with an operation that has yielded this condition."""
    if isinstance(condition, int):
        return members.staging.barrier.poll(condition, 1)
    return bool(condition.Test())


def perform(members: Sequence[Members], steps: Callable[[int], Iterator[Any]], seed: int = 0) -> list[Any]:
    """Perform an operation on all ranks, in an order of chance; return the values that it returns."""
    ranks = {rank: steps(rank) for rank in range(len(members))}
    results = interleave(ranks, lambda rank, condition: is_met(members[rank], condition), seed)
    return [results[rank] for rank in range(len(members))]
