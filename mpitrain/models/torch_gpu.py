"""A GPU as a device of PyTorch modules, whose tensors share memory with CuPy's arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..core.layout import Array
from ..gpu.device import Gpu
from ..nn.layer import SumOverWorkers


class TorchGpu:
    """A GPU; see ``torch_device.TorchDevice``.

    Torch computes on the stream of mpitrain's kernels, so that neither waits for the other.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.torch_device = gpu, self.device_of(gpu)
        with self.activate():
            self._loss = gpu.zeros((1,), np.float64)
            self._loss_tensor = from_dlpack(self._loss)

    @staticmethod
    def device_of(gpu: Gpu) -> torch.device:
        """Return torch's device of a GPU."""
        return torch.device("cuda", gpu.index)

    def use(self) -> None:
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(self._stream())

    @contextmanager
    def activate(self) -> Iterator[None]:
        with self._gpu.activate(), torch.cuda.stream(self._stream()):
            yield

    def exclusive(self) -> AbstractContextManager[object]:
        return self.activate()  # every GPU has random numbers of its own

    def summing(self, sum_over_workers: SumOverWorkers) -> SumOverWorkers:
        return sum_over_workers

    def loss_of(self, loss: Tensor) -> Any:
        self._loss_tensor.copy_(loss.reshape(1))
        return self._loss

    def add_loss(self, total: Any, loss: Any) -> Any:
        return total + loss  # a new array: the loss is valid only until the next micro-batch

    def to_host(self, vector: Array) -> Array:
        return self._gpu.to_host(vector)

    def has_room(self, *arrays: Array) -> bool:
        return self._gpu.has_room(*arrays)

    def memory_use(self) -> dict[str, int]:
        return {"torch": torch.cuda.max_memory_allocated(self.torch_device), "held": self._gpu.held}

    def synchronize(self) -> None:
        with self._gpu.activate():
            self._gpu.compute.wait()

    def _stream(self) -> Any:
        return torch.cuda.ExternalStream(self._gpu.compute.raw.ptr, device=self.torch_device)
