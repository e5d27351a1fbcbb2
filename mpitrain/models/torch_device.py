"""The device on which a PyTorch module computes: the CPU, and the interface of other devices."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Array
from ..nn.layer import SumOverWorkers

# Torch's random generator on the CPU is global: only one replica at a time may draw numbers.
_lock = threading.Lock()


class TorchDevice:
    """The device on which a module computes: the CPU. ``TorchGpu`` overrides all members.

    Attributes:
        torch_device: Torch's device.
    """

    torch_device = torch.device("cpu")

    def use_device(self) -> None:
        """See ``SteppedModel``."""

    def activate(self) -> AbstractContextManager[object]:
        """Return a context in which torch's operations run on this device."""
        return nullcontext()

    def exclusive(self) -> AbstractContextManager[object]:
        """Like ``activate``; if replicas share random numbers, no other replica computes in this context."""
        return _lock

    def summing(self, sum_over_workers: SumOverWorkers) -> SumOverWorkers:
        """Return a sum over the workers that layers may call inside ``exclusive``."""

        def sum_while_released(array: Array) -> None:
            if not _lock.locked():  # a script's own loop computes in one thread, without ``exclusive``
                return sum_over_workers(array)
            state = torch.get_rng_state()
            _lock.release()  # other replicas compute until they arrive at the sum, too
            try:
                sum_over_workers(array)
            finally:
                _lock.acquire()
                torch.set_rng_state(state)

        return sum_while_released

    def upload_indices(self, indices: Array) -> Tensor:
        """Return indices, shape (n,), int64, as a tensor on this device, valid until the second next call."""
        return torch.from_numpy(indices)

    def loss_of(self, loss: Tensor) -> Any:
        """Return a loss, shape () or (1,), as ``Model.compute_loss`` does."""
        return loss.item()

    def add_loss(self, total: Any, loss: Any) -> Any:
        """See ``Model.add_loss``."""
        return total + loss

    def to_host(self, vector: Array) -> Array:
        """See ``Model.to_host``."""
        return vector

    def has_room(self, *arrays: Array) -> bool:
        """Return whether copies of these arrays should be kept on this device."""
        return False

    def memory_use(self) -> dict[str, int]:
        """See ``Model.memory_use``."""
        return {}

    def synchronize(self) -> None:
        """Wait until all operations are done."""
