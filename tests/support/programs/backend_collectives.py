"""Every operation of the backend with many shapes and types, compared with results that each rank computes itself.

    python backend_collectives.py [RANKS_PER_NODE] [--device cpu]

With RANKS_PER_NODE the ranks act as if they were on several nodes. The device becomes PyTorch's default. Rank 0 prints
one line of JSON: the number of checks, and a digest of its floating-point results of all reductions. The digest must be
the same in every run.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("ranks_per_node", type=int, nargs="?")
parser.add_argument("--device", default="cpu")
arguments = parser.parse_args()
if arguments.ranks_per_node:
    import mpitrain.backend.members as members

    split_by_node = members.split_by_node
    members.split_by_node = lambda comm: comm.Split(comm.rank // arguments.ranks_per_node, key=comm.rank)

torch.set_num_threads(1)
torch.set_default_device(arguments.device)
dist.init_process_group("mpitrain", init_method="mpitrain://")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
SHAPES = [(), (1,), (0,), (5, 3), (1000, 3), (70_001,), (600_011,)]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
OPS = dist.ReduceOp
COMBINE = {
    OPS.SUM: torch.add,
    OPS.AVG: torch.add,
    OPS.PRODUCT: torch.mul,
    OPS.MIN: torch.minimum,
    OPS.MAX: torch.maximum,
    OPS.BAND: torch.bitwise_and,
    OPS.BOR: torch.bitwise_or,
    OPS.BXOR: torch.bitwise_xor,
}
checks, digest = 0, hashlib.sha256()


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return the tensor of a rank, which every rank can compute."""
    return _tensor_of(rank, shape, dtype, seed).clone()


@functools.lru_cache(maxsize=64)
def _tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(arguments.device).manual_seed(1000 * rank + seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 40, shape, generator=generator).to(dtype)


def equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    global checks
    checks += 1
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    assert torch.equal(found, expected), f"rank {RANK}: {what}: {found} instead of {expected}"


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check that tensors are equal except for rounding; add the bits of ``found`` to the digest."""
    global checks
    checks += 1
    if found.is_floating_point():
        digest.update(found.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    exact = not (found.is_floating_point() or found.is_complex())
    if exact:
        equal(found, expected, what)
    else:
        tolerance = 0.1 if found.dtype in (torch.bfloat16, torch.float16) else 1e-5
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=what)


def reduced(
    shape: tuple[int, ...], dtype: torch.dtype, op: object, seed: int = 0, index: int | None = None
) -> torch.Tensor:
    tensors = [tensor_of(rank, shape, dtype, seed) for rank in range(SIZE)]
    result = functools.reduce(COMBINE[op], tensors)
    if op == OPS.AVG:
        result = result / SIZE if dtype.is_floating_point or dtype.is_complex else result // SIZE
    return result


def reductions() -> None:
    for dtype in [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]:
        for op in COMBINE:
            if op in (OPS.BAND, OPS.BOR, OPS.BXOR) and dtype not in (*INTEGERS, torch.bool):
                continue
            if (dtype.is_complex and op not in (OPS.SUM, OPS.AVG)) or (dtype == torch.bool and op == OPS.AVG):
                continue
            for shape in SHAPES if op == OPS.SUM and dtype in (torch.float32, torch.bfloat16) else [(5, 3)]:
                what = f"{op} {dtype} {shape}"
                found = tensor_of(RANK, shape, dtype)
                dist.all_reduce(found, op)
                close(found, reduced(shape, dtype, op), f"all_reduce {what}")
                root = SIZE - 1
                found = tensor_of(RANK, shape, dtype)
                dist.reduce(found, root, op)
                if root == RANK:
                    close(found, reduced(shape, dtype, op), f"reduce {what}")
                inputs = [tensor_of(RANK, shape, dtype, seed) for seed in range(SIZE)]
                found = torch.empty(shape, dtype=dtype)
                dist.reduce_scatter(found, inputs, op)
                close(found, reduced(shape, dtype, op, seed=RANK), f"reduce_scatter {what}")
                if shape:
                    dist.reduce_scatter_tensor(found.zero_(), torch.cat(inputs), op)
                    close(found, reduced(shape, dtype, op, seed=RANK), f"reduce_scatter_tensor {what}")


def copies() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64):
        for shape in SHAPES if dtype == torch.float32 else SHAPES[:-1]:
            what, own = f"{dtype} {shape}", tensor_of(RANK, shape, dtype)
            everyone = [tensor_of(rank, shape, dtype) for rank in range(SIZE)]
            for root in {0, SIZE - 1}:
                found = own.clone()
                dist.broadcast(found, root)
                equal(found, everyone[root], f"broadcast {what}")
                rows = [torch.empty_like(own) for _ in range(SIZE)]
                dist.gather(own, rows if root == RANK else None, root)
                for rank in range(SIZE) if root == RANK else ():
                    equal(rows[rank], everyone[rank], f"gather {what}")
                found = torch.empty_like(own)
                parts = [tensor_of(root, shape, dtype, seed) for seed in range(SIZE)]
                dist.scatter(found, parts if root == RANK else None, root)
                equal(found, tensor_of(root, shape, dtype, RANK), f"scatter {what}")
            rows = [torch.empty_like(own) for _ in range(SIZE)]
            dist.all_gather(rows, own)
            for rank in range(SIZE):
                equal(rows[rank], everyone[rank], f"all_gather {what}")
            if shape:
                found = torch.empty((SIZE * shape[0], *shape[1:]), dtype=dtype)
                dist.all_gather_into_tensor(found, own)
                equal(found, torch.cat(everyone), f"all_gather_into_tensor {what}")
                found = torch.empty((SIZE * shape[0], *shape[1:]), dtype=dtype)
                dist.all_to_all_single(found, torch.cat([tensor_of(RANK, shape, dtype, j) for j in range(SIZE)]))
                equal(found, torch.cat([tensor_of(i, shape, dtype, RANK) for i in range(SIZE)]), f"all_to_all {what}")
            rows = [torch.empty_like(own) for _ in range(SIZE)]
            dist.all_to_all(rows, [tensor_of(RANK, shape, dtype, j) for j in range(SIZE)])
            for rank in range(SIZE):
                equal(rows[rank], tensor_of(rank, shape, dtype, RANK), f"all_to_all {what}")
    sizes = [[(i + 2 * j) % 4 for j in range(SIZE)] for i in range(SIZE)]  # rows that rank i sends to rank j
    sent = torch.arange(2.0 * sum(sizes[RANK])).view(-1, 2) + 100 * RANK
    received = [sizes[i][RANK] for i in range(SIZE)]
    found = torch.empty(sum(received), 2)
    dist.all_to_all_single(found, sent, received, sizes[RANK])
    parts = [(torch.arange(2.0 * sum(sizes[i])).view(-1, 2) + 100 * i).split(sizes[i])[RANK] for i in range(SIZE)]
    equal(found, torch.cat(parts), "all_to_all_single of unequal sizes")


def layouts() -> None:
    whole = tensor_of(RANK, (6, 8), torch.float32)
    column, expected = whole[:, ::2].t(), reduced((6, 8), torch.float32, OPS.SUM)[:, ::2].t()
    dist.all_reduce(column)
    close(column, expected, "all_reduce of a view")
    close(whole[:, ::2], expected.t(), "the whole of the view")
    found = torch.empty(3, 4).t()
    dist.broadcast(found.copy_(tensor_of(RANK, (4, 3), torch.float32)), 0)
    equal(found, tensor_of(0, (4, 3), torch.float32), "broadcast of a view")
    parameter = torch.nn.Parameter(tensor_of(RANK, (5,), torch.float32))
    dist.broadcast(parameter, 0)
    equal(parameter.detach(), tensor_of(0, (5,), torch.float32), "broadcast of a parameter")


def asynchronous() -> None:
    tensors = [tensor_of(RANK, (n,), torch.float32) for n in (3, 100_000, 7, 300_001)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future().then(lambda future: future.value()[0] * 2) for work in works[::2]]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    for tensor, n in zip(tensors, (3, 100_000, 7, 300_001), strict=True):
        close(tensor, reduced((n,), torch.float32, OPS.SUM), "asynchronous all_reduce")
    for future, tensor in zip(futures, tensors[::2], strict=True):
        equal(future.wait(), tensor * 2, "a future's then")
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, OPS.MAX)
    manager.wait()
    dist.all_reduce_coalesced(tensors, OPS.MAX)
    dist.barrier()
    dist.barrier(async_op=True).wait()


def messages() -> None:
    if SIZE == 1:
        return
    left, right = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    for dtype, shape in ((torch.float32, (5, 3)), (torch.bool, (70_001,)), (torch.bfloat16, (0,))):
        found = torch.empty(shape, dtype=dtype)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor_of(RANK, shape, dtype), right), dist.P2POp(dist.irecv, found, left)]
        )
        for work in works:
            work.wait()
        equal(found, tensor_of(left, shape, dtype), "a message")
    if RANK == 0:
        senders = set()
        for _ in range(1, SIZE):
            found = torch.empty(4)
            sender = dist.recv(found, tag=7)
            equal(found, tensor_of(sender, (4,), torch.float32), "a message of any rank")
            senders.add(sender)
        assert senders == set(range(1, SIZE))
    else:
        dist.send(tensor_of(RANK, (4,), torch.float32), 0, tag=7)


def objects_and_groups() -> None:
    found: list[object] = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK})
    assert found == [{"rank": rank} for rank in range(SIZE)]
    shared = [RANK, "text"]
    dist.broadcast_object_list(shared, 0)
    assert shared == [0, "text"]
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, [f"for {rank}" for rank in range(SIZE)], 0)
    assert scattered == [f"for {RANK}"]
    for ranks in ([0], list(range(0, SIZE, 2)), list(range(SIZE - 1, -1, -1))):
        group = dist.new_group(ranks)
        if RANK in ranks:
            tensor = torch.tensor([RANK + 1])
            dist.all_reduce(tensor, group=group)
            equal(tensor, torch.tensor([sum(rank + 1 for rank in ranks)]), f"a group of {ranks}")
            dist.destroy_process_group(group)
    assert dist.get_backend() == "mpitrain"


for part in (reductions, copies, layouts, asynchronous, messages, objects_and_groups):
    part()
dist.destroy_process_group()
dist.init_process_group("mpitrain", init_method="mpitrain://")
tensor = torch.ones(2)
dist.all_reduce(tensor)
equal(tensor, torch.full((2,), float(SIZE)), "a second init_process_group")
dist.destroy_process_group()
if RANK == 0:
    print(json.dumps({"checks": checks, "digest": digest.hexdigest()}))
if arguments.ranks_per_node:
    members.split_by_node = split_by_node
