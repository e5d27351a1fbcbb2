"""The model as a rank trains it: the loss and the gradient of a batch, on one device or on several.

Several devices work as towers: the batch is cut, every device computes the gradient of its part with a copy of the
model, and the parts' gradients are summed in the order of the devices. (Krizhevsky, One weird trick for parallelizing
convolutional neural networks, 2014, section 3.1, within a rank.)
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from .device import CPU, Device
from .job import Job
from .kernels import sum_rows
from .nn.layer import Context, Layer, SumOverWorkers, bind, place
from .nn.loss import Loss
from .params import Array, Layout
from .plan import split_batch

T = TypeVar("T")


class Replica(Protocol):
    """What computes gradients. Every method is local, but for layers that communicate (see ``Context``)."""

    def bind(self, params: Array, grads: Array) -> None:
        """Compute with ``params`` and write to ``grads``, shape (layout.size,) each, from now on."""

    def forward(self, examples: Array, labels: Array, context: Context) -> float:
        """The loss of a batch, weighted by ``context.weight``; shapes as ``Loader.batch`` returns them."""

    def backward(self) -> None:
        """Assign the gradient of what the last ``forward`` returned."""

    def close(self) -> None:
        """End what runs beside the caller."""


class Single:
    """The job's own model, on one device."""

    def __init__(self, model: Layer, loss: Loss, layout: Layout, device: Device) -> None:
        self._model, self._loss, self._layout = model, loss, layout
        place(model, device)
        loss.device = device
        self._gradient: Any = None

    def bind(self, params: Array, grads: Array) -> None:
        bind(self._model, self._layout, params, grads)

    def forward(self, examples: Array, labels: Array, context: Context) -> float:
        outputs = self._model.forward(examples, context)
        loss, self._gradient = self._loss(outputs, labels, context.weight)
        return loss

    def backward(self) -> None:
        self._model.backward(self._gradient)

    def close(self) -> None:
        """Nothing to do."""


class Towers:
    """Copies of the model on several devices, each in a thread of its own; the first in the caller's."""

    def __init__(self, job: Job, layout: Layout, dtype: Any, devices: Sequence[Device]) -> None:
        self._towers = [Single(*copy.deepcopy((job.model, job.loss)), layout, device) for device in devices]
        self._rows = np.zeros((len(devices), layout.size), dtype)
        self._order = np.arange(len(devices))
        self._threads = ThreadPoolExecutor(len(devices) - 1, "tower")
        self._meeting = Meeting(len(devices))
        self._grads = self._rows[0]

    def bind(self, params: Array, grads: Array) -> None:
        self._grads = grads
        for tower, row in zip(self._towers, self._rows, strict=True):
            tower.bind(params, row)

    def forward(self, examples: Array, labels: Array, context: Context) -> float:
        parts = split_batch(len(examples), len(self._towers))

        def of_tower(index: int) -> float:
            start, stop = parts[index]
            own = replace(context, position=context.position + start)
            own.sum_over_workers = self._meeting.summing(index, context.sum_over_workers)
            return self._towers[index].forward(examples[start:stop], labels[start:stop], own)

        return sum(self._on_all(of_tower))

    def backward(self) -> None:
        self._on_all(lambda index: self._towers[index].backward())
        sum_rows(self._rows, self._order, 0, self._rows.shape[1], 1.0, self._grads)

    def close(self) -> None:
        self._threads.shutdown()

    def _on_all(self, work: Callable[[int], T]) -> list[T]:
        """What ``work`` returns for each tower; raises what the first that failed by itself has raised."""

        def guarded(index: int) -> T:
            try:
                with np.errstate(all="ignore"):  # as the training loop has it; threads do not inherit that
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


class Meeting:
    """Sums of small arrays over a rank's towers, and over the workers where these sum, too."""

    def __init__(self, towers: int) -> None:
        self._barrier = threading.Barrier(towers)
        self._parts: list[Array] = [np.empty(0)] * towers

    def summing(self, index: int, sum_over_workers: SumOverWorkers | None) -> SumOverWorkers:
        """For the tower ``index``: a sum in place, which all towers must enter; the first alone communicates."""

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
        """Have those that wait raise an error: a tower has failed and will not come."""
        self._barrier.abort()


def replica_of(job: Job, layout: Layout, dtype: Any, devices: Sequence[Device] = (CPU,)) -> Replica:
    """The replica of a rank that computes on ``devices``."""
    if len(devices) == 1:
        return Single(job.model, job.loss, layout, devices[0])
    return Towers(job, layout, dtype, devices)
