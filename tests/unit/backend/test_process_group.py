"""PyTorch's interface on simulated ranks, which are threads, with tensors of any layout."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from mpitrain.backend import process_group as module  # noqa: E402
from mpitrain.backend.members import members_of  # noqa: E402
from mpitrain.backend.process_group import MpiProcessGroup  # noqa: E402
from mpitrain.backend.staging import TEXT_BYTES  # noqa: E402
from mpitrain.errors import CollectiveFailed  # noqa: E402

from ...simulators.simulated_mpi import ANY_SOURCE, Comm, World, simulate  # noqa: E402
from ...support.simulated_groups import make_small  # noqa: E402

Run = Callable[[Callable[[MpiProcessGroup, int], Any]], list[Any]]
NODES = (0, 0, 1)
SIZE = len(NODES)


def make_run(monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]) -> Run:
    """Return a function that runs a program on all ranks of a new group, and returns the results."""
    make_small(monkeypatch)
    world: World = simulate(monkeypatch, node_of)

    def join(store: Any, rank: int, size: int, name: str, timeout: timedelta) -> Any:
        return members_of(world.comm(rank).Dup(), name)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "join", join)

    def run(program: Callable[[MpiProcessGroup, int], Any]) -> list[Any]:
        def of_rank(comm: Comm) -> Any:
            group = MpiProcessGroup(None, comm.rank, comm.size, timedelta(minutes=1), "own")
            result = program(group, comm.rank)
            group.shutdown()
            is_freed = comm.rank in group._members.comm._board.freed  # type: ignore[attr-defined]
            assert is_freed == (group._queue.failed is None)
            return result

        return world.run(of_rank)

    return run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return make_run(monkeypatch, NODES)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> MpiProcessGroup:
    """A group of one rank."""
    make_small(monkeypatch)
    world = simulate(monkeypatch, (0,))
    monkeypatch.setattr(module, "join", lambda *arguments: members_of(world.comm(0).Dup(), "own"))  # type: ignore[arg-type]
    return MpiProcessGroup(None, 0, 1, timedelta(minutes=1), "own")


def of_rank(rank: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-50, 50, shape, generator=generator).double()


def transposed(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """Return the same values as ``of_rank`` in another layout."""
    return of_rank(rank, *shape, seed=seed).t().contiguous().t()


def options(kind: str, **values: Any) -> Any:
    made = getattr(dist, f"{kind}Options")()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def total(*shape: int, seed: int = 0) -> Tensor:
    return sum((of_rank(rank, *shape, seed=seed) for rank in range(1, SIZE)), of_rank(0, *shape, seed=seed))


def test_all_reduce(run: Run) -> None:
    def program(group: MpiProcessGroup, rank: int) -> list[Tensor]:
        tensors = [transposed(rank, 4, 30), of_rank(rank, 3, seed=1)]
        group.allreduce([tensors[0]]).wait()
        group.allreduce_coalesced([tensors[1]], options("AllreduceCoalesced", reduceOp=dist.ReduceOp.AVG)).wait()
        sparse = torch.eye(3).to_sparse() * (rank + 1)
        group.allreduce([sparse]).wait()
        return [*tensors, sparse.to_dense()]

    for first, second, third in run(program):
        assert torch.equal(first, total(4, 30)) and torch.equal(third, 6 * torch.eye(3))
        torch.testing.assert_close(second, total(3, seed=1) / SIZE)


def test_operations_with_a_root(run: Run) -> None:
    def program(group: MpiProcessGroup, rank: int) -> list[Any]:
        reduced, sent = transposed(rank, 4, 5), transposed(rank, 4, 5)
        group.reduce([reduced], options("Reduce", rootRank=2, reduceOp=dist.ReduceOp.MAX)).wait()
        group.broadcast([sent], options("Broadcast", rootRank=1)).wait()
        row = [torch.zeros(5, 4).double().t() for _ in range(SIZE)]
        gathered = [row] if rank == 1 else []
        group.gather(gathered, [transposed(rank, 4, 5)], options("Gather", rootRank=1)).wait()
        part = torch.zeros(5, 4, dtype=torch.float64).t()
        parts = [[transposed(other, 4, 5, seed=7) for other in range(SIZE)]] if rank == 0 else []
        group.scatter([part], parts, options("Scatter", rootRank=0)).wait()
        return [reduced, sent, row, part]

    for rank, (reduced, sent, row, part) in enumerate(run(program)):
        largest = torch.stack([of_rank(other, 4, 5) for other in range(SIZE)]).amax(0)
        assert torch.equal(reduced, largest if rank == 2 else of_rank(rank, 4, 5))
        assert torch.equal(sent, of_rank(1, 4, 5)) and torch.equal(part, of_rank(rank, 4, 5, seed=7))
        for other, out in enumerate(row):
            assert torch.equal(out, of_rank(other, 4, 5) if rank == 1 else torch.zeros(4, 5).double())


def test_all_gather(run: Run) -> None:
    def program(group: MpiProcessGroup, rank: int) -> list[Any]:
        row = [torch.zeros(3, 2).double().t() for _ in range(SIZE)]
        group.allgather([row], [transposed(rank, 2, 3)]).wait()
        pairs = [[torch.zeros(n).double() for n in (2, 5)] for _ in range(SIZE)]
        group.allgather_coalesced(pairs, [of_rank(rank, 2), of_rank(rank, 5)]).wait()
        whole = torch.zeros(SIZE * 2, 3).double()
        group.all_gather_single(whole, transposed(rank, 2, 3)).wait()
        return [row, pairs, whole]

    expected = [of_rank(rank, 2, 3) for rank in range(SIZE)]
    for row, pairs, whole in run(program):
        assert all(map(torch.equal, row, expected)) and torch.equal(whole, torch.cat(expected))
        for rank, (first, second) in enumerate(pairs):
            assert torch.equal(first, of_rank(rank, 2)) and torch.equal(second, of_rank(rank, 5))


def test_reduce_scatter(run: Run) -> None:
    def program(group: MpiProcessGroup, rank: int) -> list[Tensor]:
        out, single = torch.zeros(2, 4).double().t(), torch.zeros(4, 2).double()
        rows = [transposed(rank, 4, 2, seed=other) for other in range(SIZE)]
        group.reduce_scatter([out], [rows]).wait()
        group.reduce_scatter_single(
            single, torch.cat(rows), options("ReduceScatter", reduceOp=dist.ReduceOp.AVG)
        ).wait()
        return [out, single]

    for rank, (out, single) in enumerate(run(program)):
        assert torch.equal(out, total(4, 2, seed=rank))
        torch.testing.assert_close(single, out / SIZE)


def test_all_to_all(run: Run) -> None:
    def sent(rank: int, to: int) -> Tensor:
        return of_rank(rank, 1 + rank + 2 * to, 2, seed=to)

    def program(group: MpiProcessGroup, rank: int) -> list[Any]:
        received = [torch.zeros(1 + other + 2 * rank, 2).double() for other in range(SIZE)]
        inputs = [sent(rank, other) for other in range(SIZE)]
        group.alltoall(received, inputs).wait()
        whole, sizes = torch.zeros(sum(map(len, received)), 2).double(), list(map(len, inputs))
        group.all_to_all_single(whole, torch.cat(inputs), list(map(len, received)), sizes).wait()
        equal = torch.zeros(SIZE, 2).double()
        group.all_to_all_single(equal, of_rank(rank, SIZE, 2), [], []).wait()
        return [received, whole, equal]

    for rank, (received, whole, equal) in enumerate(run(program)):
        expected = [sent(other, rank) for other in range(SIZE)]
        assert all(map(torch.equal, received, expected)) and torch.equal(whole, torch.cat(expected))
        assert torch.equal(equal, torch.stack([of_rank(other, SIZE, 2)[rank] for other in range(SIZE)]))


def test_messages(run: Run) -> None:
    def program(group: MpiProcessGroup, rank: int) -> Any:
        if rank == 0:
            outs = [torch.zeros(5, 4).double().t() for _ in range(2)]
            works = [group.recv([outs[0]], 2, 7), group.recv([outs[1]], 1, 7)]
            single = torch.zeros(1).double()
            source = group.recv_anysource([single], 9)
            assert all(work.wait() for work in (*works, source))
            return outs, single.item(), source.source_rank()
        group.send([transposed(rank, 4, 5)], 0, 7).wait()
        if rank == 2:
            group.send([torch.tensor([3.0]).double()], 0, 9).wait()
        return None

    (outs, single, source), *_ = run(program)
    assert torch.equal(outs[0], of_rank(2, 4, 5)) and torch.equal(outs[1], of_rank(1, 4, 5))
    assert (single, source) == (3.0, 2)


def test_operations_without_waiting_are_performed_in_order(run: Run) -> None:
    def program(group: MpiProcessGroup, rank: int) -> Tensor:
        tensor = of_rank(rank, 200)
        works = [
            group.allreduce([tensor]),
            group.broadcast([tensor], options("Broadcast", rootRank=1)),
            group.barrier(),
        ]
        works[-1].wait()
        assert all(work.is_completed() for work in works)
        assert group._get_sequence_number_for_group() == 3
        return tensor

    assert all(torch.equal(tensor, total(200)) for tensor in run(program))


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_shapes_that_differ_fail_on_all_ranks(monkeypatch: pytest.MonkeyPatch, node_of: tuple[int, ...]) -> None:
    run = make_run(monkeypatch, node_of)
    failed: list[int] = []

    def program(group: MpiProcessGroup, rank: int) -> None:
        with pytest.raises(CollectiveFailed, match=r"float32 \(2, 3\).*float32 \(3, 2\)"):
            group.broadcast([torch.ones(2 + rank, 3 - rank)]).wait()
        failed.append(rank)

    run(program)
    assert sorted(failed) == [0, 1]


@pytest.mark.parametrize("root", [-1, 1])
def test_a_root_outside_the_group(alone: MpiProcessGroup, root: int) -> None:
    tensor = torch.ones(1)
    for call in (
        lambda: alone.broadcast([tensor], options("Broadcast", rootRank=root)),
        lambda: alone.reduce([tensor], options("Reduce", rootRank=root)),
        lambda: alone.gather([[tensor]], [tensor], options("Gather", rootRank=root)),
        lambda: alone.scatter([tensor], [[tensor]], options("Scatter", rootRank=root)),
    ):
        with pytest.raises(ValueError, match=f" {root};"):
            call()


def test_tensors_that_do_not_fit(alone: MpiProcessGroup) -> None:
    one, two = torch.ones(1), torch.ones(2)
    for call in (
        lambda: alone.allgather([[one, one]], [one]),
        lambda: alone.allgather([[two]], [one]),
        lambda: alone.all_gather_single(two, one),
        lambda: alone.gather([[two]], [one]),
        lambda: alone.scatter([one], [[two]]),
        lambda: alone.reduce_scatter([one], [[two]]),
        lambda: alone.reduce_scatter_single(one, two),
        lambda: alone.all_to_all_single(one, two, [2], []),
        lambda: alone.allreduce([one.to_sparse()], options("Allreduce", reduceOp=dist.ReduceOp.MAX)),
        lambda: alone.broadcast([one.to_sparse()]).wait(),
    ):
        with pytest.raises(ValueError, match=r"\d|sparse"):
            call()


def test_a_group_with_several_backends_is_refused(alone: MpiProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = dist.distributed_c10d._world.pg_backend_config
    monkeypatch.setitem(configs, alone, "cpu:mpitrain,cuda:nccl")
    with pytest.raises(ValueError, match="nccl"):
        alone.barrier()
    monkeypatch.setitem(configs, alone, "cpu:mpitrain,cuda:mpitrain")
    assert alone.barrier().wait()


def test_a_message_from_any_rank_has_one_part(alone: MpiProcessGroup) -> None:
    with pytest.raises(ValueError, match=" 4000 "):
        alone.recv_anysource([torch.ones(1000)])
    assert module.MPI.ANY_SOURCE == ANY_SOURCE


def test_properties(alone: MpiProcessGroup) -> None:
    assert (alone.rank(), alone.size(), alone.name(), alone.getBackendName()) == (0, 1, "mpitrain", "mpitrain")
    assert alone.group_name == alone.getGroupName() == "own"
    assert alone._device_types[0] == torch.device("cpu")
    alone.set_timeout(timedelta(seconds=7))
    assert alone.barrier().timeout_s == 7
    assert alone.barrier(options("Barrier", timeout=timedelta(seconds=3))).timeout_s == 3
    assert alone.barrier(options("Barrier")).timeout_s == 7
    alone.shutdown()
    alone.shutdown()  # a second call has no effect


def test_equal_operations_have_equal_signatures() -> None:
    def described(name: str, *tensors: Tensor, agreed: tuple[object, ...] = ()) -> tuple[str, bytes, int]:
        return module._describe(name, (*agreed, *module._shapes_of(tensors)))

    one, two = torch.ones(2, 3), torch.ones(3, 2)
    calls = [
        described("all_reduce", one, agreed=("sum",)),
        described("all_reduce", one, agreed=("max",)),
        described("all_reduce", two, agreed=("sum",)),
        described("all_reduce", one.double(), agreed=("sum",)),
        described("broadcast", one, agreed=(0,)),
        described("broadcast", one, agreed=(1,)),
        described("broadcast", one, two),
        described("barrier"),
        described("all_reduce", *[one] * 500),
        described("all_reduce", *[one] * 499, two),
    ]
    assert len({text for text, _, _ in calls}) == len({signature for _, _, signature in calls}) == len(calls)
    assert calls[0] == described("all_reduce", torch.zeros(2, 3), agreed=("sum",))
    assert calls[0][:2] == ("all_reduce sum float32 (2, 3)", b"all_reduce sum float32 (2, 3)\0")
    assert all(len(encoded) <= TEXT_BYTES and encoded[-1] == 0 for _, encoded, _ in calls)
    assert all(-(2**63) <= signature < 2**63 for _, _, signature in calls)
