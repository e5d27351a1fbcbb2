"""The peer of ``bench/links.py``: a rank of DistributedDataParallel over gloo; or the bandwidth of a TCP connection.

    python bench/peers/links.py ddp RANK RANKS ADDRESS HIDDEN LAYERS STEPS DATA_DIR POWERSGD_RANK
    python bench/peers/links.py send ADDRESS MIB
    python bench/peers/links.py receive ADDRESS MIB

Rank 0 prints a JSON list: examples/s of all ranks for each interval of steps except the first. A POWERSGD_RANK of 0
sums whole gradients. ``receive`` prints bytes per second.
"""

from __future__ import annotations

import gzip
import itertools
import json
import socket
import sys
import time
from pathlib import Path

BATCH, PARTS, PORT = 100, 8, 29511


def ddp(rank: int, ranks: int, address: str, hidden: int, layers: int, steps: int, folder: str, powersgd: int) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=ranks)

    def read(name: str, header: int) -> np.ndarray:
        with gzip.open(Path(folder) / name) as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    examples = torch.from_numpy(read("train-images-idx3-ubyte.gz", 16).reshape(-1, 784).astype(np.float32) / 255)
    labels = torch.from_numpy(read("train-labels-idx1-ubyte.gz", 8).astype(np.int64))
    torch.manual_seed(0)
    widths = [784, *[hidden] * layers]
    pairs = itertools.pairwise(widths)
    model = nn.Sequential(*[part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())], nn.Linear(hidden, 10))
    model = nn.parallel.DistributedDataParallel(model)
    if powersgd:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=powersgd, start_powerSGD_iter=4)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer, loss_of = torch.optim.Adam(model.parameters(), 1e-3, fused=True), nn.CrossEntropyLoss()
    order = torch.randperm(len(examples))
    rates, every, began = [], max(1, steps // PARTS), time.perf_counter()
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
    dist.destroy_process_group()


def send(address: str, mib: int) -> None:
    block = bytes(1 << 20)
    for _ in range(100):
        try:
            connection = socket.create_connection((address, PORT))
            break
        except OSError:
            time.sleep(0.1)
    with connection:
        for _ in range(mib):
            connection.sendall(block)


def receive(address: str, mib: int) -> None:
    with socket.create_server((address, PORT)) as server, server.accept()[0] as connection:
        buffer, received, began = bytearray(1 << 20), 0, time.perf_counter()
        skipped = mib // 4  # until the connection has its speed
        while received < mib << 20:
            received += connection.recv_into(buffer)
            if skipped and received >= skipped << 20:
                began, skipped, first = time.perf_counter(), 0, received
        print(json.dumps((received - first) / (time.perf_counter() - began)))


if __name__ == "__main__":
    program, *words = sys.argv[1:]
    if program == "ddp":
        rank, ranks, address, *numbers = words
        hidden, layers, steps, folder, powersgd = numbers
        ddp(int(rank), int(ranks), address, int(hidden), int(layers), int(steps), folder, int(powersgd))
    else:
        {"send": send, "receive": receive}[program](words[0], int(words[1]))
