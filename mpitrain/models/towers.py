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
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ..core.device import Device
from ..core.kernels import sum_rows
from ..core.layout import Array, Layout
from ..core.ranges import split_batch
from ..errors import JobError
from ..nn.layer import Context, Layer, SumOverWorkers
from ..nn.loss import Loss
from ..plan.job import Job
from .base import Model

T = TypeVar("T")
# Make a model for one device from layers and a loss.
MakeOne = Callable[[Layer, Loss, Any], Model]


class Towers(Model):
    """Copies of the model on several devices, one thread each; the first runs in the caller's thread."""

    def __init__(self, make: MakeOne, job: Job, layout: Layout, dtype: Any, devices: Sequence[Device]) -> None:
        copies = [_copied(job) for _ in devices[1:]]  # the first device uses the job's own, which hooks may refer to
        pairs = zip([(job.model, job.loss), *copies], devices, strict=True)
        self._towers = [make(model, loss, device) for (model, loss), device in pairs]
        self.accepts_raw = self._towers[0].accepts_raw
        self._rows = np.zeros((len(devices), layout.size), dtype)
        self._order = np.arange(len(devices))
        self._threads = ThreadPoolExecutor(len(devices) - 1, "tower")
        self._meeting = TowerAllreduce(len(devices))
        self._grads = self._rows[0]

    def bind(self, params: Array, grads: Array) -> None:
        self._grads = grads
        for tower, row in zip(self._towers, self._rows, strict=True):
            tower.bind(params, row)

    def refresh(self) -> None:
        self._on_all(lambda index: self._towers[index].refresh())

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        return self._towers[0].evaluate(examples, labels)

    def forward(self, examples: Array, labels: Array, context: Context) -> Any:
        losses = self._forward_all(examples, labels, context)
        return sum(tower.loss_value(loss) for tower, loss in zip(self._towers, losses, strict=True))

    def _forward_all(self, examples: Array, labels: Array, context: Context) -> list[Any]:
        """Return the result of each tower's ``forward`` for its part of a batch."""
        parts = split_batch(len(examples), len(self._towers))

        def of_tower(index: int) -> Any:
            start, stop = parts[index]
            own = replace(context, position=context.position + start)
            own.sum_over_workers = self._meeting.summing(index, context.sum_over_workers)
            return self._towers[index].forward(examples[start:stop], labels[start:stop], own)

        return self._on_all(of_tower)

    def backward(self) -> None:
        self._on_all(lambda index: self._towers[index].backward())
        sum_rows(self._rows, self._order, 0, self._rows.shape[1], 1.0, self._grads)

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
                self._meeting.abort()
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


def _copied(job: Job) -> tuple[Layer, Loss]:
    try:
        return copy.deepcopy((job.model, job.loss))
    except Exception as error:
        raise JobError(
            f"--devices-per-rank: the model cannot be copied for each device ({error}); "
            "its layers may hold only arrays and values; fix them or use --devices-per-rank 1"
        ) from error
