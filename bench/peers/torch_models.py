"""The peers of ``bench/torch_models.py``: the same modules with DistributedDataParallel over gloo, and without.

    python bench/peers/torch_models.py MODEL RANKS STEPS HOW [OPTIMIZER [zero]]

HOW is the bucket size in MB (``bucket_cap_mb``), or ``alone`` for ranks that do not communicate. With ``zero``,
``ZeroRedundancyOptimizer`` shards the optimizer. Prints as JSON the examples/s of all ranks for each interval of steps
except the first, and the memory of all ranks in bytes (PSS). Batches are slices of a tensor in memory, because a
DataLoader would be slower.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
import torch_models as models
from spawn import run_ranks

INTERVALS = 10


def main(rank: int, ranks: int, name: str, steps: int, how: str, kind: str = "", zero: str = "") -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = models.module_of(name)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    if how != "alone":
        model = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=float(how)
        )
    make, options = (
        (getattr(torch.optim, kind), models.OPTIMIZERS[kind]) if kind else (torch.optim.Adam, {"fused": True})
    )
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), make, lr=1e-3, **options)
    else:
        optimizer = make(model.parameters(), lr=1e-3, **options)
    examples, labels = map(torch.from_numpy, models.arrays_of(name))
    order, batch, rates = torch.randperm(len(examples)), models.BATCH[name], []
    every = max(1, steps // INTERVALS)
    began = time.perf_counter()
    for step in range(steps):
        start = (step * ranks + rank) * batch % (len(examples) - batch)
        chosen = order[start : start + batch]
        optimizer.zero_grad()
        models.loss_of(model(examples[chosen]), labels[chosen]).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            now = time.perf_counter()
            rates.append(every * batch * ranks / (now - began))
            began = now
    dist.barrier()
    used = torch.tensor([models.pss_bytes()])
    dist.all_reduce(used)
    if rank == 0:
        print(json.dumps({"rates": rates[1:], "memory": int(used)}), flush=True)
    dist.barrier()  # gloo aborts a rank whose peer has exited before it
    dist.destroy_process_group()


if __name__ == "__main__":
    name, ranks, steps, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    run_ranks(main, ranks, name, steps, how, *sys.argv[5:])
