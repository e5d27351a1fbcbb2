"""Groups of simulated ranks on several nodes: their numbers, communicators and shared memory."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mpitrain.backend import members as module, process_end  # noqa: E402
from mpitrain.backend.members import Members, create_comm, join, members_of  # noqa: E402
from mpitrain.errors import LaunchError  # noqa: E402

from ...simulators.simulated_mpi import Comm, SimulatedMpi, simulate  # noqa: E402
from ...support.simulated_groups import TOPOLOGIES, make_members, make_small  # noqa: E402

MINUTE = timedelta(minutes=1)


class Store(dict[str, bytes]):
    """A store of one process, in which all entries are present, or some never appear."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.check(keys):
            raise RuntimeError("timeout")

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@pytest.mark.parametrize("node_of", [*TOPOLOGIES, (1, 0, 1), (2, 2, 0, 1)], ids=str)
def test_ranks_know_their_nodes(monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]) -> None:
    members = make_members(monkeypatch, node_of)
    numbered = [sorted(set(node_of), key=node_of.index).index(node) for node in node_of]  # by their first ranks
    for rank, own in enumerate(members):
        assert (own.rank, own.size, own.node_of, own.node) == (rank, len(node_of), numbered, numbered[rank])
        assert own.index_of == [numbered[:other].count(numbered[other]) for other in range(len(node_of))]
        assert own.ranks_of_node(own.node)[own.index_of[rank]] == rank
        assert own.on_one_node == (len(set(node_of)) == 1)
        assert (own.headers is not None) == (own.index_of[rank] == 0 and not own.on_one_node)
        assert own.staging.size == own.hierarchy.node.size == node_of.count(node_of[rank])
        assert own.hierarchy.n_chunks == min(map(node_of.count, node_of))


def test_ranks_of_a_node_that_are_behind_or_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    members = make_members(monkeypatch, (0, 1, 0, 1, 0))
    members[2].staging.publish()
    assert members[2].behind() == [0, 4] and members[1].behind() == []
    members[4].staging.mark_ended()
    members[3].staging.mark_ended()
    assert [rank for rank in range(5) if members[0].has_ended(rank)] == [4]  # rank 3 is on another node
    assert [rank for rank in range(5) if members[1].has_ended(rank)] == [3]


def test_ranks_that_cannot_share_memory_are_nodes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sharing_problem", lambda node, nbytes: "full" if node.size == 3 else "")
    for own in make_members(monkeypatch, (0, 1, 0, 0)):
        assert own.node_of == [0, 1, 2, 3] and own.staging.size == 1


def test_a_group_is_freed_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    world = simulate(monkeypatch, (0, 1, 0))

    def program(comm: Comm) -> Members:
        own = members_of(comm.Dup(), "group")  # type: ignore[arg-type]
        own.free()
        return own

    for own in world.run(program):
        assert own.staging not in process_end._groups
        freed = [own.comm, own.messages, own.headers, own.hierarchy.internode]
        assert all(comm._board.freed == set(range(comm.size)) for comm in freed if comm is not None)


@pytest.mark.parametrize("order", [[0, 1, 2], [3, 1], [2, 0, 3]])
def test_a_communicator_of_some_ranks_in_another_order(monkeypatch: pytest.MonkeyPatch, order: list[int]) -> None:
    world = simulate(monkeypatch, [0] * 4)

    def program(comm: Comm) -> tuple[int, list[int]] | None:
        if comm.rank not in order:
            return None
        created = create_comm(comm, order, 40_000)  # type: ignore[arg-type]
        return created.rank, created.allgather(comm.rank)

    for rank, found in enumerate(world.run(program)):
        assert found == ((order.index(rank), order) if rank in order else None)


def joined(monkeypatch: pytest.MonkeyPatch, world_ranks: list[int], store: Any) -> list[Members]:
    """Let ranks of a world of 4 join a group through a store that already has their entries."""
    make_small(monkeypatch)
    world = simulate(monkeypatch, [0] * 4)
    monkeypatch.setattr(module, "start", lambda: module.MPI.COMM_WORLD)
    monkeypatch.setattr(module, "library_name", lambda: "Own MPI 1.0")

    def program(comm: Comm) -> Members | None:
        if comm.rank not in world_ranks:
            return None
        return join(store, world_ranks.index(comm.rank), len(world_ranks), "group", MINUTE)

    return [own for own in world.run(program) if own is not None]


def entries(world_ranks: list[int], size: int = 4) -> Store:
    return Store({f"mpitrain/{i}": f"{rank} {size} Own MPI 1.0".encode() for i, rank in enumerate(world_ranks)})


def test_a_group_has_the_order_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    by_world_rank = joined(monkeypatch, [3, 0, 2], entries([3, 0, 2]))
    assert [own.rank for own in by_world_rank] == [1, 2, 0]
    assert {own.name for own in by_world_rank} == {"group"}


def test_ranks_that_do_not_join_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = entries([0])
    store["mpitrain/2"] = b"2 4 Own MPI 1.0"
    monkeypatch.setattr(module, "start", lambda: SimpleNamespace(rank=0, size=4))
    monkeypatch.setattr(module, "library_name", lambda: "Own MPI 1.0")
    simulate(monkeypatch, [0])
    with pytest.raises(LaunchError, match="60 s, ranks 1, 3 "):
        join(store, 0, 4, "group", MINUTE)


@pytest.mark.parametrize(
    "other", [b"0 4 Own MPI 1.0", b"1 1 Own MPI 1.0", b"1 4 Other MPI"], ids=["same rank", "alone", "other library"]
)
def test_ranks_of_different_programs_are_refused(monkeypatch: pytest.MonkeyPatch, other: bytes) -> None:
    store = Store({"mpitrain/1": other})
    monkeypatch.setattr(module, "start", lambda: SimpleNamespace(rank=0, size=4))
    monkeypatch.setattr(module, "library_name", lambda: "Own MPI 1.0")
    simulate(monkeypatch, [0])
    with pytest.raises(LaunchError, match="mpirun -n 2 "):
        join(store, 0, 2, "group", MINUTE)


def test_threads_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "start", lambda: None)
    simulate(monkeypatch, [0])
    monkeypatch.setattr(SimulatedMpi, "Query_thread", staticmethod(lambda: 2))
    with pytest.raises(LaunchError, match="MPI_THREAD_MULTIPLE"):
        join(Store(), 0, 1, "group", MINUTE)
