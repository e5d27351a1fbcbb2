"""The operations of Horovod's API, compared with values that each rank computes itself.

    python horovod_operations.py [RANKS_PER_NODE]

With RANKS_PER_NODE the ranks act as if they were on several nodes. Rank 0 prints the number of checks as JSON.
"""

from __future__ import annotations

import json
import sys

import torch

import mpitrain.horovod.torch as hvd

if len(sys.argv) > 1:
    import mpitrain.backend.members as members

    split_by_node = members.split_by_node
    members.split_by_node = lambda comm: comm.Split(comm.rank // int(sys.argv[1]), key=comm.rank)

hvd.init()
torch.set_num_threads(1)
rank, size = hvd.rank(), hvd.size()
checks = 0


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    global checks
    checks += 1
    assert found.dtype == expected.dtype and found.shape == expected.shape, (what, found, expected)
    torch.testing.assert_close(found, expected, msg=lambda text: f"rank {rank}, {what}: {text}")


def tensor_of(of: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(of)
    return (torch.randn(shape, generator=generator) * 20).to(dtype)


def all_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [tensor_of(of, shape, dtype) for of in range(size)]


SHAPES = [(), (1,), (0, 4), (5, 3), (40_000,), (300_000,)]
for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16):
    for shape in SHAPES:
        parts = all_of(shape, dtype)
        total = sum(parts[1:], parts[0].clone())
        own = parts[rank].clone()
        tolerant = dtype != torch.bfloat16
        if tolerant:
            check(hvd.allreduce(own, op=hvd.Sum), total, f"Sum {dtype} {shape}")
        check(own, parts[rank], "the input")
        check(hvd.allreduce(own, op=hvd.Max), torch.stack(parts).amax(0), f"Max {dtype} {shape}")
        check(hvd.allreduce_(own.clone(), op=hvd.Min), torch.stack(parts).amin(0), f"Min {dtype} {shape}")
        for root in range(size):
            check(hvd.broadcast(own, root), parts[root], f"broadcast {dtype} {shape}")
        if shape:
            check(hvd.allgather(own), torch.cat(parts), f"allgather {dtype} {shape}")

# Tensors of many sizes, submitted in a different order by each rank: some are fused, some are divided.
shapes = [(3,), (70_000,), (2, 2), (400_000,), (), (0,), (16_384,), (1,)]
order = torch.randperm(len(shapes), generator=torch.Generator().manual_seed(rank)).tolist()
handles = {at: hvd.allreduce_async(tensor_of(10 * rank + at, shapes[at]), name=f"many {at}") for at in order}
for at, handle in handles.items():
    mean = sum(tensor_of(10 * of + at, shapes[at]) for of in range(size)) / size
    check(hvd.synchronize(handle), mean, f"many {at}")
grouped = hvd.grouped_allreduce([tensor_of(10 * rank + at, shapes[at]) for at in range(8)], op=hvd.Sum, name="group")
for at, found in enumerate(grouped):
    check(found, sum(tensor_of(10 * of + at, shapes[at]) for of in range(size)), f"group {at}")

# Numbers of rows that differ between ranks.
check(hvd.allgather(tensor_of(rank, (rank, 3))), torch.cat([tensor_of(of, (of, 3)) for of in range(size)]), "rows")
n = 2 * size + 1
mean = sum(all_of((n, 2))) / size
shares = [n // size + (of < n % size) for of in range(size)]
check(hvd.reducescatter(tensor_of(rank, (n, 2))), mean.split(shares)[rank], "reducescatter")
sent = torch.arange(size * (size + 1) // 2) + 100 * rank
received, counts = hvd.alltoall(sent, splits=[*range(1, size + 1)])
splits = [*range(1, size + 1)]
expected = torch.cat([(torch.arange(len(sent)) + 100 * of).split(splits)[rank] for of in range(size)])
check(received, expected, "alltoall")
check(counts, torch.full((size,), rank + 1, dtype=torch.int32), "counts of alltoall")

# Other layouts, scales, gradients, sparse tensors.
column = tensor_of(rank, (6, 8))[:, ::2].t()
check(hvd.allreduce_(column, op=hvd.Sum), sum(all_of((6, 8)))[:, ::2].t(), "a view, in place")
scaled = hvd.allreduce(tensor_of(rank, (9,)), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
check(scaled, 1.5 * sum(all_of((9,))), "scales")
check(hvd.allreduce(torch.full((4,), 7), op=hvd.Sum, postscale_factor=0.1), torch.full((4,), int(0.7 * size)), "int")
x = tensor_of(rank, (4, 2)).requires_grad_()
(hvd.allreduce(x, op=hvd.Sum) * (rank + 1)).sum().backward()
check(x.grad, torch.full((4, 2), size * (size + 1) / 2), "gradient")
sparse = torch.sparse_coo_tensor([[rank, 5]], [1.0, 2.0], (size + 6,))
dense = torch.zeros(size + 6).index_add_(
    0, torch.tensor([*range(size), *[5] * size]), torch.tensor([1.0] * size + [2.0] * size)
)
check(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense(), dense, "sparse")

# Process sets.
if size > 1:
    evens, last = hvd.add_process_set(range(0, size, 2)), hvd.add_process_set([size - 1])
    if evens.included():
        total = sum(tensor_of(of, (33,)) for of in evens.ranks)
        check(hvd.allreduce(tensor_of(rank, (33,)), op=hvd.Sum, process_set=evens), total, "process set")
    if last.included():
        found = hvd.broadcast(tensor_of(1, (3,)), size - 1, process_set=last)
        check(found, tensor_of(1, (3,)), "set of one rank")
    assert hvd.remove_process_set(last) and not hvd.remove_process_set(last)

# A rank without batches joins; the other ranks continue.
for step in range(3 + rank):
    present = [of for of in range(size) if step < 3 + of]
    check(
        hvd.allreduce(tensor_of(rank, (20,)), op=hvd.Sum), sum(tensor_of(of, (20,)) for of in present), f"join {step}"
    )
assert hvd.join() == size - 1
check(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size)), "after join")
assert hvd.allgather_object({"rank": rank}) == [{"rank": of} for of in range(size)]
hvd.shutdown()
hvd.init()
check(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size)), "after a second init")
if rank == 0:
    print(json.dumps({"checks": checks, "size": size}))
hvd.shutdown()
if len(sys.argv) > 1:
    members.split_by_node = split_by_node
