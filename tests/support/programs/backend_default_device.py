"""Operations on CPU tensors, also of Horovod's interface, while PyTorch's default device is another device."""

from __future__ import annotations

import torch
import torch.distributed as dist

import mpitrain.horovod.torch as hvd

CPU = {"device": "cpu"}
hvd.init()
dist.init_process_group("mpitrain", init_method="mpitrain://")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
torch.set_default_device("meta")  # its tensors have no memory

row = torch.full((SIZE,), RANK + 1.0, **CPU)
total = SIZE * (SIZE + 1) / 2
dist.all_reduce(row)
assert row.tolist() == [total] * SIZE
column = torch.full((SIZE, 2), RANK + 1.0, **CPU)[:, 0]  # not contiguous
dist.all_reduce(column)
assert column.tolist() == [total] * SIZE
part = torch.zeros(1, **CPU)
dist.reduce_scatter(part, [torch.full((1,), RANK + 1.0, **CPU) for _ in range(SIZE)])
assert part.item() == total
sparse = torch.sparse_coo_tensor(torch.tensor([[RANK]], **CPU), torch.ones(1, **CPU), (SIZE,), **CPU)
dist.all_reduce(sparse)
assert sparse.to_dense().tolist() == [1.0] * SIZE
received = torch.zeros(sum(range(1, SIZE + 1)), **CPU)
sent = torch.full((SIZE * (RANK + 1),), float(RANK), **CPU)
dist.all_to_all_single(received, sent, list(range(1, SIZE + 1)), [RANK + 1] * SIZE)
assert received.tolist() == [float(rank) for rank in range(SIZE) for _ in range(rank + 1)]
found: list[object] = [None] * SIZE
dist.all_gather_object(found, RANK)
assert found == list(range(SIZE))
assert hvd.allgather(torch.full((RANK + 1,), float(RANK), **CPU)).tolist() == received.tolist()
assert hvd.broadcast_object({"rank": RANK}, 0) == {"rank": 0}
leaf = torch.ones(RANK + 1, requires_grad=True, **CPU)
hvd.allgather(leaf).sum().backward()
assert leaf.grad is not None and leaf.grad.tolist() == [1.0] * (RANK + 1)
assert hvd.alltoall(torch.arange(float(SIZE), **CPU)).tolist() == [float(RANK)] * SIZE
dist.destroy_process_group()
hvd.shutdown()
torch.set_default_device(None)
