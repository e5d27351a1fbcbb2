"""mpitrain with PyTorch modules on simulated GPUs: torch computes on the CPU, in memory of the simulated CuPy.

Checks which memory holds each array, and that copies finish before their use. Torch's streams are not simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mpitrain.__main__ import main
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


SyncGpu.average = average_and_wait  # type: ignore[method-assign]
TorchGpu.device_of = staticmethod(lambda gpu: torch.device("cpu"))  # type: ignore[method-assign]
TorchGpu.activate = activate  # type: ignore[method-assign]
TorchGpu.use = lambda self: None  # type: ignore[method-assign]
TorchGpu._limit_memory = lambda self: None  # type: ignore[method-assign]
TorchGpu.has_room = lambda self, *arrays: self._gpu.has_room(*arrays)  # type: ignore[method-assign]
TorchGpu.upload_indices = lambda self, indices: torch.from_numpy(indices)  # type: ignore[method-assign]
assert Gpu.is_gpu
sys.exit(main())
