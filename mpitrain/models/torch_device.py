"""The device on which a PyTorch module computes: the interface, and the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.layout import Array
from ..nn.layer import SumOverWorkers
from ..pytorch.rng_lock import exclusive, released


class TorchDevice(Protocol):
    """A device on which a module computes.

    Attributes:
        torch_device: Torch's device.
    """

    torch_device: torch.device

    def use(self) -> None:
        """Let the calling thread's torch operations run on this device from now on."""

    def activate(self) -> AbstractContextManager[object]:
        """Return a context in which torch's operations run on this device."""

    def exclusive(self) -> AbstractContextManager[object]:
        """Like ``activate``; if replicas share random numbers, no other replica computes in this context."""

    def summing(self, sum_over_workers: SumOverWorkers) -> SumOverWorkers:
        """Return a sum over the workers that layers may call inside ``exclusive``."""

    def upload_indices(self, indices: Array) -> Tensor:
        """Return indices, shape (n,), int64, as a tensor on this device, valid until the second next call."""

    def loss_of(self, loss: Tensor) -> Any:
        """Return a loss, shape () or (1,), as ``Model.compute_loss`` does."""

    def add_loss(self, total: Any, loss: Any) -> Any:
        """See ``Model.add_loss``."""

    def to_host(self, vector: Array) -> Array:
        """See ``Model.to_host``."""

    def has_room(self, *arrays: Array) -> bool:
        """Return whether copies of these arrays should be kept on this device."""

    def memory_use(self) -> dict[str, int]:
        """See ``Model.memory_use``."""

    def synchronize(self) -> None:
        """Wait until all operations are done."""


class TorchCpu:
    """The CPU; see ``TorchDevice``."""

    torch_device = torch.device("cpu")

    def use(self) -> None:
        """Do nothing: torch computes there by default."""

    def activate(self) -> AbstractContextManager[object]:
        return nullcontext()

    def exclusive(self) -> AbstractContextManager[object]:
        return exclusive()

    def summing(self, sum_over_workers: SumOverWorkers) -> SumOverWorkers:
        """Return a sum that lets other replicas compute until they arrive at the sum, too."""

        def sum_while_released(array: Array) -> None:
            with released():
                sum_over_workers(array)

        return sum_while_released

    def upload_indices(self, indices: Array) -> Tensor:
        return torch.from_numpy(indices)

    def loss_of(self, loss: Tensor) -> Any:
        return loss.item()

    def add_loss(self, total: Any, loss: Any) -> Any:
        return total + loss

    def to_host(self, vector: Array) -> Array:
        return vector

    def has_room(self, *arrays: Array) -> bool:
        return False

    def memory_use(self) -> dict[str, int]:
        return {}

    def synchronize(self) -> None:
        """Do nothing: operations on the CPU are synchronous."""
