"""PyTorch's parallel wrappers give the same results over the backend as over gloo."""

from __future__ import annotations

import json

from ..support.launch import PROGRAMS
from ..support.world.controller import World

WAYS = {"DDP", "DDP, many buckets", "DDP, allreduce", "DDP, fp16", "DDP, PowerSGD", "ZeRO", "FSDP1", "FSDP2"}
PARTS = {"DTensor", "DTensor moved", "checkpoint", "asynchronous checkpoint", "state of rank 0", "DataLoader"}


def test_parameters_are_those_of_gloo(world: World) -> None:
    done = world.run(3, PROGRAMS / "backend_training.py", timeout=240)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == WAYS | PARTS
    for name, difference in found.items():
        assert difference < (1e-2 if "fp16" in name else 1e-8), name
