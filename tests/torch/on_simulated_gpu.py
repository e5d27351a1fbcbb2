"""Lets PyTorch modules of mpitrain compute on the CPU, in memory of the simulated CuPy, where this is imported.

Checks which memory holds each array, and that copies finish before their use. Torch's streams are not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mpitrain.gpu.device import Gpu
from mpitrain.models.torch_gpu import TorchGpu
from mpitrain.strategy.sync_gpu import SyncGpu


@contextmanager
def activate(self: TorchGpu) -> Iterator[None]:
    with self._gpu.activate():
        self._gpu.compute.wait()  # earlier work is complete, as on the GPU's stream
        yield


average = SyncGpu.average


def average_and_wait(self: SyncGpu) -> None:
    average(self)
    self._device.compute.wait()  # the script's operations follow, on the GPU in the same stream


REPLACED = [
    (SyncGpu, "average", average_and_wait),
    (TorchGpu, "device_of", staticmethod(lambda gpu: torch.device("cpu"))),
    (TorchGpu, "activate", activate),
    (TorchGpu, "use_device", lambda self: None),
    (TorchGpu, "_limit_memory", lambda self: None),
    (TorchGpu, "has_room", lambda self, *arrays: self._gpu.has_room(*arrays)),
    (TorchGpu, "upload_indices", lambda self, indices: torch.from_numpy(indices)),
]
for owner, name, function in REPLACED:
    assert name in vars(owner), name
    setattr(owner, name, function)
assert Gpu.is_gpu
