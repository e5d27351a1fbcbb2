"""The peer of ``bench/sync.py``: the same job with PyTorch's DistributedDataParallel over gloo.

    python bench/peers/ddp.py MODEL RANKS STEPS DATA_DIR

Prints a JSON list: examples/s of all ranks combined, for each interval of steps except the first. Batches are slices of
a tensor in memory, because a DataLoader would be slower; Adam has PyTorch's defaults.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from spawn import run_ranks
from torch import nn

BATCH = 100
INTERVAL_PARTS = 10


def model_of(name: str) -> nn.Module:
    if name.startswith("mlp"):
        hidden = int(name.removeprefix("mlp"))
        return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(7 * 7 * 64, 10),
    )


def read_idx(path: Path, header: int) -> np.ndarray:
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)


def main(rank: int, ranks: int, name: str, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    images = read_idx(Path(folder) / "train-images-idx3-ubyte.gz", 16).reshape(-1, 784)
    examples = torch.from_numpy(images.astype(np.float32) / 255)
    labels = torch.from_numpy(read_idx(Path(folder) / "train-labels-idx1-ubyte.gz", 8).astype(np.int64))
    torch.manual_seed(0)
    model = model_of(name)
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss_of = nn.CrossEntropyLoss()
    order = torch.randperm(len(examples))
    rates = []
    every = max(1, steps // INTERVAL_PARTS)
    began = time.perf_counter()
    for step in range(steps):
        start = (step * ranks + rank) * BATCH % (len(examples) - BATCH)
        batch = order[start : start + BATCH]
        optimizer.zero_grad()
        loss_of(model(examples[batch]), labels[batch]).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            now = time.perf_counter()
            rates.append(every * BATCH * ranks / (now - began))
            began = now
    if rank == 0:
        print(json.dumps(rates[1:]), flush=True)
    if ranks > 1:
        dist.barrier()  # gloo aborts a rank whose peer has exited before it
        dist.destroy_process_group()


if __name__ == "__main__":
    name, ranks, steps, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    run_ranks(main, ranks, name, steps, folder)
