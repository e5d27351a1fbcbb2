"""The peer of ``bench/diloco.py``: DiLoCo of torchft over gloo, on the same model and examples.

    python bench/peers/torchft_diloco.py RANK RANKS FIRST OWN HIDDEN STEPS SYNC_EVERY DELAY SEED DATA_DIR

FIRST is the address of the first host, which runs the lighthouse; OWN is the address of this rank's host. Each rank is
a replica group of its own. Rank 0 prints JSON: seconds per step in each cycle of SYNC_EVERY steps except the first, and
the accuracy at the end. Needs torchft and torch, not mpitrain.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

BATCH, PORT, LIMIT = 100, 29410, timedelta(seconds=120)


def read(folder: str, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = []
    for name, header in ((f"{part}-images-idx3-ubyte.gz", 16), (f"{part}-labels-idx1-ubyte.gz", 8)):
        with gzip.open(Path(folder) / name) as file:
            arrays.append(np.frombuffer(file.read(), np.uint8, offset=header))
    return torch.from_numpy(arrays[0].reshape(-1, 784).astype(np.float32) / 255), torch.from_numpy(
        arrays[1].astype(int)
    )


def make_manager(rank: int, ranks: int, first: str, own: str) -> tuple[Manager, list[object]]:
    """Return the manager of this replica group, and the objects that must live as long as the manager."""
    alive: list[object] = [TCPStore(own, PORT + 1 + rank, is_master=True, wait_for_workers=False)]
    if rank == 0:
        alive.append(LighthouseServer(bind=f"0.0.0.0:{PORT}", min_replicas=ranks, join_timeout_ms=60_000))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=ranks,
        use_async_quorum=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=PORT + 1 + rank,
        lighthouse_addr=f"http://{first}:{PORT}",
        replica_id=f"worker{rank}",
        hostname=own,
        init_sync=False,
    )
    return manager, alive


def main() -> None:
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    first, own = sys.argv[3:5]
    hidden, steps, every, delay, seed = map(int, sys.argv[5:10])
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    examples, labels = read(sys.argv[10], "train")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    inner = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
    manager, _alive = make_manager(rank, ranks, first, own)
    loss_of, cycles = nn.CrossEntropyLoss(), []
    with DiLoCo(
        manager, [model], inner, outer, every, fragment_sync_delay=delay, fragment_update_alpha=0.5 if delay else 0.0
    ):
        began = time.perf_counter()
        for step in range(steps):
            place = step * ranks * BATCH % len(labels)
            if step == 0 or place < (step - 1) * ranks * BATCH % len(labels):
                order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed + step))
            chosen = order[place + rank * BATCH : place + (rank + 1) * BATCH]
            inner.zero_grad()
            loss_of(model(examples[chosen]), labels[chosen]).backward()
            inner.step()
            if (step + 1) % every == 0:
                now = time.perf_counter()
                cycles.append((now - began) / every)
                began = now
    if rank == 0:
        examples, labels = read(sys.argv[10], "t10k")
        with torch.no_grad():
            accuracy = (model(examples).argmax(dim=1) == labels).float().mean().item()
        print(json.dumps({"step_s": cycles[1:], "accuracy": accuracy}), flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
