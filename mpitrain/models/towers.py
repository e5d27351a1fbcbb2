"""Several devices per rank, as towers.

The batch is split, every device computes the gradient of its part with a copy of the model, and the gradients are
summed in the order of the devices. (Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014,
section 3.1, within a rank.)
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ..core.device import Device
from ..core.extra_state import ExtraState
from ..core.kernels import sum_rows
from ..core.layout import Array, page_aligned, row_stride
from ..core.ranges import OnReady, announce_nothing, split_batch
from ..core.training_state import TrainingState
from ..data.batch import Batch
from ..errors import JobError
from ..nn.layer import SumOverWorkers
from ..plan.job import Job
from ..plan.network import Network, network_of
from ..plan.plan import Plan
from .base import Model

T = TypeVar("T")
SumOver = SumOverWorkers | None
# Makes a model for one device from a network, the device, its state, and the sum over the workers.
MakeOne = Callable[[Network, Any, TrainingState, SumOver], Model]


class Towers(Model):
    """Copies of the model on several devices, one thread each; the first runs in the caller's thread."""

    def __init__(
        self, make: MakeOne, job: Job, plan: Plan, devices: Sequence[Device], state: TrainingState, sum_over: SumOver
    ) -> None:
        super().__init__(plan.config.training.accumulate_steps)
        copies = [_copied(job) for _ in devices[1:]]  # the first device uses the job's own, which hooks may refer to
        self._allreduce = TowerAllreduce(len(devices))
        states = self._states(devices, state)
        self._towers = [
            make(network, device, states[index], self._allreduce.summing(index, sum_over))
            for index, (network, device) in enumerate(zip([job.network, *copies], devices, strict=True))
        ]
        self.accepts_raw = self._towers[0].accepts_raw
        self._size = plan.layout.size
        # Each row has its own pages: a GPU may page-lock it.
        self._rows = page_aligned((len(devices), row_stride(self._size)), plan.dtype)
        self._order = np.arange(len(devices))
        self._threads = ThreadPoolExecutor(len(devices) - 1, "tower")

    def _states(self, devices: Sequence[Device], state: TrainingState) -> list[TrainingState]:
        """Return the state for each device."""
        return [state] * len(devices)

    def bind(self, params: Array, grads: Array) -> None:
        super().bind(params, grads)
        for tower, row in zip(self._towers, self._rows, strict=True):
            tower.bind(params, row[: self._size])

    def load_params(self) -> None:
        self._on_all(lambda index: self._towers[index].load_params())

    def evaluate(self, batch: Batch) -> tuple[float, int | None]:
        return self._towers[0].evaluate(batch)

    def compute_loss(self, batch: Batch) -> Any:
        return sum(float(loss) for loss in self._compute_losses(batch))

    def _compute_losses(self, batch: Batch) -> list[Any]:
        """Return the loss of each tower for its part of a batch."""
        parts = split_batch(batch.count, len(self._towers))
        return self._on_all(lambda index: self._towers[index].compute_loss(batch.part(*parts[index])))

    def compute_grads(self, on_ready: OnReady) -> None:
        self._on_all(lambda index: self._towers[index].compute_grads(announce_nothing))
        sum_rows(self._rows, self._order, 0, self._size, 1.0, self.grads)

    @property
    def extra_state(self) -> ExtraState:
        return self._towers[0].extra_state

    def load_extra_state(self, state: ExtraState) -> None:
        for tower in self._towers:
            tower.load_extra_state(state)

    def close(self) -> None:
        self._threads.shutdown()
        for tower in self._towers:
            tower.close()

    def _on_all(self, work: Callable[[int], T]) -> list[T]:
        """Return the result of ``work`` for each tower; raise the error that caused any failure."""

        def guarded(index: int) -> T:
            try:
                with np.errstate(all="ignore"):  # same as in the training loop; threads do not inherit it
                    return work(index)
            except BaseException:
                self._allreduce.abort()
                raise

        futures = [self._threads.submit(guarded, index) for index in range(1, len(self._towers))]
        done: list[Future[T]] = [Future(), *futures]
        try:
            done[0].set_result(guarded(0))
        except BaseException as error:
            done[0].set_exception(error)
        errors = [failed for future in done if (failed := future.exception()) is not None]
        for failed in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
            raise failed
        return [future.result() for future in done]


class TowerAllreduce:
    """Sums small arrays over a rank's towers, and over the workers if requested."""

    def __init__(self, towers: int) -> None:
        self._barrier = threading.Barrier(towers)
        self._parts: list[Array] = [np.empty(0)] * towers

    def summing(self, index: int, sum_over_workers: SumOverWorkers | None) -> SumOverWorkers:
        """Return an in-place sum for the tower ``index``. All towers must call it; the first one communicates."""

        def sum_over_towers(array: Array) -> None:
            self._parts[index] = array
            self._barrier.wait()
            if index == 0:
                total = np.sum(self._parts, axis=0)
                if sum_over_workers is not None:
                    sum_over_workers(total)
                self._parts = [total] * len(self._parts)
            self._barrier.wait()
            total = self._parts[index]
            self._barrier.wait()
            array[...] = total

        return sum_over_towers

    def abort(self) -> None:
        """Raise an error in waiting towers, because one has failed and will not arrive."""
        self._barrier.abort()


def _copied(job: Job) -> Network:
    try:
        return network_of(*copy.deepcopy((job.network.model, job.network.loss)))
    except Exception as error:
        raise JobError(
            f"--devices-per-rank: the model cannot be copied for each device ({error}); "
            "its layers may hold only arrays and values; fix them or use --devices-per-rank 1"
        ) from error
