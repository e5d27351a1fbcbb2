"""A PyTorch module on a GPU, whose tensors share memory with CuPy's arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..core.layout import Array
from ..core.ranges import OnReady, announce_nothing
from ..core.training_state import TrainingState
from ..data.batch import Batch, IndexBatch
from ..data.split import Split
from ..gpu.device import Gpu
from ..nn.layer import SumOverWorkers
from ..plan.plan import Plan
from ..pytorch.batches import TORCH_DTYPES, Inputs
from ..pytorch.network import TorchNetwork
from .base import Model
from .gpu_model import GpuModel
from .torch_model import TorchModel
from .torch_towers import freeze_alike
from .towers_gpu import GpuTowers

_INDEXABLE = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")  # by torch's index_select


class TorchGpuModel(GpuModel, TorchModel):
    """A module on a GPU. It computes on the stream of mpitrain's kernels, so that neither waits for the other.

    If the bound vectors are on the GPU, parameters and gradients are views of them, and gradients are announced while
    backward computes earlier layers. If they are in host memory, parameters are copied to the GPU before a forward
    pass, and gradients back after the backward pass.
    """

    def __init__(
        self,
        network: TorchNetwork,
        plan: Plan,
        gpu: Gpu,
        split: Split,
        state: TrainingState,
        sum_over_workers: SumOverWorkers | None = None,
    ) -> None:
        self._gpu, self.device = gpu, self.device_of(gpu)
        self._scale = None if network.takes_integers(split) else split.scale
        self._held: list[Tensor] = []  # training examples and labels, if they are on the GPU
        network.model.to(self.device)
        super().__init__(network, plan, state, sum_over_workers)
        self._copies: dict[str, Array] = {}
        with self._computing():
            self._result = gpu.zeros((1,), np.float64)
            self._result_tensor = from_dlpack(self._result)

    @staticmethod
    def device_of(gpu: Gpu) -> torch.device:
        """Return torch's device of a GPU."""
        return torch.device("cuda", gpu.index)

    def bind(self, params: Array, grads: Array) -> None:
        Model.bind(self, params, grads)  # ``TorchModel.bind`` would use vectors in host memory directly
        self._params_bound, self._on_host = params, not self._gpu.owns(params)
        with self._computing():
            if self._on_host:
                self._gpu.pin(grads)
                self._gpu.pin(params)
                params, grads = self._copy("params", params), self._copy("grads", grads)
            self._use(params, grads)
        self.load_params()

    def load_params(self) -> None:
        super().load_params()
        if self._on_host:
            with self._gpu.activate():
                self._gpu.compute.copy_to_device(self._params_bound, self._copies["params"])

    def hold(self, examples: Array, labels: Array) -> bool:
        arrays = examples, labels
        if not all(each.dtype.name in _INDEXABLE for each in arrays) or not self._gpu.has_room(*arrays):
            return False
        with self._computing():
            self._held = [torch.from_numpy(each).to(self.device, copy=True) for each in arrays]
        return True

    def compute_loss(self, batch: Batch) -> Any:
        with self._computing():
            return self._compute_loss(batch)

    def _inputs(self, batch: Batch) -> Inputs:
        if not isinstance(batch, IndexBatch):
            return super()._inputs(batch)
        indices = torch.from_numpy(batch.examples).to(self.device)
        examples, labels = (each.index_select(0, indices) for each in self._held)
        if self._scale is None:
            return Inputs((self._converted(examples),), {}, self._converted(labels))
        scaled = examples.to(TORCH_DTYPES[self._dtype.char]).mul_(self._scale)
        return Inputs((scaled,), {}, self._converted(labels))

    def _converted(self, tensor: Tensor) -> Tensor:
        """Convert floats to the parameters' type and integers to int64, as ``to_tensor`` does."""
        return tensor.to(TORCH_DTYPES[self._dtype.char] if tensor.is_floating_point() else torch.int64)

    def begin_forward(self, position: int) -> None:
        with self._computing():
            super().begin_forward(position)

    def end_forward(self, loss: Tensor, count: int) -> Any:
        with self._computing():
            return super().end_forward(loss, count)

    def _result_of(self, loss: Tensor) -> Any:
        if self._on_host:
            return loss.item()
        self._result_tensor.copy_(loss.reshape(1))
        return self._result

    def use_device(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(self._stream())

    def compute_grads(self, on_ready: OnReady) -> None:
        if not self._on_host:
            with self._computing():
                # Autograd calls ``on_ready`` in its own thread.
                self._compute_grads(lambda start: self._announce(start, on_ready))
            return
        with self._computing():
            self._compute_grads(announce_nothing)
            self._gpu.download(self._copies["grads"], self.grads)

    def evaluate(self, batch: Batch) -> tuple[float, int | None]:
        with self._computing():
            return super().evaluate(batch)

    def memory_use(self) -> dict[str, int]:
        return {"torch": torch.cuda.max_memory_allocated(self.device), "held": self._gpu.held}

    def _summing(self, sum_over_workers: SumOverWorkers) -> SumOverWorkers:
        return sum_over_workers  # every GPU has random numbers of its own

    def _announce(self, start: int, on_ready: OnReady) -> None:
        with self._computing():
            on_ready(start)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Let torch and CuPy compute on this GPU and its stream, in this thread."""
        with self._gpu.activate(), torch.cuda.stream(self._stream()):
            yield

    def _stream(self) -> Any:
        return torch.cuda.ExternalStream(self._gpu.compute.raw.ptr, device=self.device)

    def _copy(self, name: str, host: Array) -> Array:
        """Return GPU memory for a vector, initially zero."""
        if name not in self._copies:
            self._copies[name] = self._gpu.zeros(host.shape, host.dtype)
        return self._copies[name]


class TorchGpuTowers(GpuTowers):
    """Copies of a PyTorch module on GPUs; see ``TorchTowers``."""

    def load_params(self) -> None:
        freeze_alike(self._towers)
        self._towers[0].load_params()  # sets ``TrainingState.frozen``
        super().load_params()
