"""A GPU as a device of PyTorch modules, whose tensors share memory with CuPy's arrays."""

from __future__ import annotations

import logging
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
from .torch_device import TorchDevice

_BUFFERS = 2  # number of buffers: one is filled while another is copied
_DATA_FRACTION = 0.5  # of the remaining memory, for training data, which could stay on the host
_log = logging.getLogger(__name__)


class _ThreadState(threading.local):
    """The GPU that the thread has activated."""

    active: TorchGpu | None = None


_thread = _ThreadState()


class TorchGpu(TorchDevice):
    """A GPU. Torch uses the same stream as mpitrain's kernels, so that neither waits for the other."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.torch_device = gpu, self.device_of(gpu)
        self._index_buffers: dict[int, list[_IndexBuffer]] = {}
        self._limit_memory()
        with self.activate():
            self._loss = gpu.zeros((1,), np.float64)
            self._loss_tensor = from_dlpack(self._loss)

    def _limit_memory(self) -> None:
        """Let torch use at most the rest of this worker's part of the GPU's memory."""
        self._limit, (_, total) = self._gpu.memory_left, torch.cuda.mem_get_info(self.torch_device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit / total), self.torch_device)
        if not self._gpu.grows:
            _log.info("--no-gpu-memory-growth has no effect on a PyTorch module: torch allocates memory as needed")

    @staticmethod
    def device_of(gpu: Gpu) -> torch.device:
        """Return torch's device of a GPU."""
        return torch.device("cuda", gpu.index)

    def use_device(self) -> None:
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(self._stream)

    def activate(self) -> AbstractContextManager[object]:
        return nullcontext() if _thread.active is self else self._activation()

    @contextmanager
    def _activation(self) -> Iterator[None]:
        before = _thread.active
        with self._gpu.activate(), torch.cuda.stream(self._stream):
            _thread.active = self
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise self._gpu.out_of_memory(error) from error
            finally:
                _thread.active = before

    def exclusive(self) -> AbstractContextManager[object]:
        return self.activate()  # every GPU has random numbers of its own

    def summing(self, sum_over_workers: SumOverWorkers) -> SumOverWorkers:
        return sum_over_workers

    def upload_indices(self, indices: Array) -> Tensor:
        buffers = self._index_buffers.setdefault(len(indices), [])
        buffers.append(buffers.pop(0) if len(buffers) == _BUFFERS else _IndexBuffer(len(indices), self.torch_device))
        return buffers[-1].upload(indices)

    def loss_of(self, loss: Tensor) -> Any:
        self._loss_tensor.copy_(loss if loss.dim() < 2 else loss.reshape(1))
        return self._loss

    def add_loss(self, total: Any, loss: Any) -> Any:
        with self.activate():
            return total + loss  # a new array: the loss is valid only until the next micro-batch

    def to_host(self, vector: Array) -> Array:
        return self._gpu.to_host(vector)

    def has_room(self, *arrays: Array) -> bool:
        used, reserved = torch.cuda.memory_allocated(self.torch_device), torch.cuda.memory_reserved(self.torch_device)
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        left = min(self._limit - used, free + reserved - used)
        return bool(sum(array.nbytes for array in arrays) <= _DATA_FRACTION * left)

    def memory_use(self) -> dict[str, int]:
        return {"torch": torch.cuda.max_memory_reserved(self.torch_device), "held": self._gpu.held}

    def synchronize(self) -> None:
        with self._gpu.activate():
            self._gpu.compute.wait()

    @cached_property
    def _stream(self) -> Any:
        return torch.cuda.ExternalStream(self._gpu.compute.raw.ptr, device=self.torch_device)


class _IndexBuffer:
    """Indices in page-locked host memory, and their copy on the GPU, for which the host does not wait."""

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
