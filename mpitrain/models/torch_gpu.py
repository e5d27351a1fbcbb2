"""A GPU as a device of PyTorch modules, whose tensors share memory with CuPy's arrays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..core.layout import Array
from ..gpu.device import Gpu
from ..nn.layer import SumOverWorkers

_BUFFERS = 2  # number of buffers: one is filled while another is copied
_TAKEN = 0.98  # fraction of the remaining memory: CUDA's libraries need some, too


class _ThreadState(threading.local):
    """Whether the thread is inside ``TorchGpu.activate``."""

    is_active = False


class TorchGpu:
    """A GPU; see ``torch_device.TorchDevice``.

    Torch uses the same stream as mpitrain's kernels, so that neither waits for the other.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.torch_device = gpu, self.device_of(gpu)
        self._thread = _ThreadState()
        self._index_buffers: dict[int, list[_IndexBuffer]] = {}
        self._limit_memory()
        with self.activate():
            self._loss = gpu.zeros((1,), np.float64)
            self._loss_tensor = from_dlpack(self._loss)

    def _limit_memory(self) -> None:
        """Let torch use the rest of this worker's part of the GPU's memory; take it now unless memory grows."""
        left, (free, total) = self._gpu.memory_left, torch.cuda.mem_get_info(self.torch_device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, left / total), self.torch_device)
        if not self._gpu.grows:
            with self.activate():  # torch keeps freed memory in its cache
                torch.empty(int(_TAKEN * min(left, free)), dtype=torch.uint8, device=self.torch_device)

    @staticmethod
    def device_of(gpu: Gpu) -> torch.device:
        """Return torch's device of a GPU."""
        return torch.device("cuda", gpu.index)

    def use(self) -> None:
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(self._stream)

    def activate(self) -> AbstractContextManager[object]:
        return nullcontext() if self._thread.is_active else self._activation()

    @contextmanager
    def _activation(self) -> Iterator[None]:
        with self._gpu.activate(), torch.cuda.stream(self._stream):
            self._thread.is_active = True
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise self._gpu.out_of_memory(error) from error
            finally:
                self._thread.is_active = False

    def exclusive(self) -> AbstractContextManager[object]:
        return self.activate()  # every GPU has random numbers of its own

    def summing(self, sum_over_workers: SumOverWorkers) -> SumOverWorkers:
        return sum_over_workers

    def upload_indices(self, indices: Array) -> Tensor:
        buffers = self._index_buffers.setdefault(len(indices), [])
        buffers.append(buffers.pop(0) if len(buffers) == _BUFFERS else _IndexBuffer(len(indices), self.torch_device))
        return buffers[-1].upload(indices)

    def loss_of(self, loss: Tensor) -> Any:
        self._loss_tensor.copy_(loss)
        return self._loss

    def add_loss(self, total: Any, loss: Any) -> Any:
        return total + loss  # a new array: the loss is valid only until the next micro-batch

    def to_host(self, vector: Array) -> Array:
        return self._gpu.to_host(vector)

    def has_room(self, *arrays: Array) -> bool:
        return self._gpu.has_room(*arrays)

    def memory_use(self) -> dict[str, int]:
        return {"torch": torch.cuda.max_memory_reserved(self.torch_device), "held": self._gpu.held}

    def synchronize(self) -> None:
        with self._gpu.activate():
            self._gpu.compute.wait()

    @cached_property
    def _stream(self) -> Any:
        return torch.cuda.ExternalStream(self._gpu.compute.raw.ptr, device=self.torch_device)


class _IndexBuffer:
    """Indices in page-locked host memory, and their copy on the GPU, which the host does not wait for."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._host = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)
        self._on_device = torch.empty(count, dtype=torch.int64, device=device)
        self._array, self._copied = self._host.numpy(), torch.cuda.Event()

    def upload(self, indices: Array) -> Tensor:
        """Return the copy of indices, shape (count,), int64; valid until the second next call for this count."""
        self._copied.synchronize()
        self._array[...] = indices
        self._on_device.copy_(self._host, non_blocking=True)
        self._copied.record()
        return self._on_device
