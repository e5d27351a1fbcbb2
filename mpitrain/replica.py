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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from .device import CPU, Device
from .errors import JobError
from .job import Job
from .kernels import sum_rows
from .nn.container import Sequential
from .nn.layer import Context, Layer, SumOverWorkers, bind, place
from .nn.loss import Loss
from .params import Array, Layout
from .plan import split_batch

T = TypeVar("T")


class Replica:
    """What computes gradients. Every method is local, but for layers that communicate (see ``Context``)."""

    def bind(self, params: Array, grads: Array) -> None:
        """Compute with ``params`` and write to ``grads``, shape (layout.size,) each, from now on."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Take notice of the parameters as they are now; to be called whenever they have changed."""

    def forward(self, examples: Array, labels: Array, context: Context) -> float:
        """The loss of a batch, weighted by ``context.weight``; shapes as ``Loader.batch`` returns them."""
        raise NotImplementedError

    def backward(self) -> None:
        """Assign the gradient of what the last ``forward`` returned."""
        raise NotImplementedError

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        """The sum of the losses of some examples, and how many are predicted right; see ``Loss.evaluate``."""
        raise NotImplementedError

    def watch(self, told: Callable[[int], None]) -> None:
        """Have ``told(i)`` called in ``backward`` when the model's children from the i-th on have their gradients.

        A replica may leave that out: all gradients are there when ``backward`` returns.
        """

    def here(self) -> AbstractContextManager[object]:
        """A block in which the vectors that this is bound to may be computed with."""
        return nullcontext()

    def fetched(self, vector: Array) -> Array:
        """A vector that this is bound to, in this process's memory: itself or a copy."""
        return vector

    def close(self) -> None:
        """End what runs beside the caller, and give memory back."""


class Single(Replica):
    """A model that computes with the vectors themselves, on one device."""

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

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        return self._loss.evaluate(self._model.forward(examples, Context()), labels)

    def watch(self, told: Callable[[int], None]) -> None:
        if isinstance(self._model, Sequential):
            self._model.after_backward = told


class Offloaded(Replica):
    """A model on a device with memory of its own.

    Vectors that it is bound to may lie there already. Where they are this process's, parameters go there when they have
    changed, and gradients come back.
    """

    def __init__(self, model: Layer, loss: Loss, layout: Layout, device: Device) -> None:
        self._device = device
        self._inner = Single(model, loss, layout, device)
        self._copies: dict[Any, Array] = {}

    def bind(self, params: Array, grads: Array) -> None:
        device = self._device
        self._params, self._grads = params, grads
        self._is_apart = not device.owns(params)
        if not self._is_apart:
            self._inner.bind(params, grads)
            return
        device.pin(params)
        device.pin(grads)
        with device.here():
            self._inner.bind(self._copy("params", params), self._copy("grads", grads))

    def refresh(self) -> None:
        if self._is_apart:
            with self._device.here():
                self._sent("params", self._params)

    def forward(self, examples: Array, labels: Array, context: Context) -> float:
        context = replace(context, sum_over_workers=self._summing(context.sum_over_workers))
        with self._device.here():
            loss = self._inner.forward(self._sent("examples", examples), self._sent("labels", labels), context)
            return float(self._device.numbers(loss))

    def backward(self) -> None:
        with self._device.here():
            self._inner.backward()
            if self._is_apart:
                self._device.download(self._copy("grads", self._grads), self._grads)

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        with self._device.here():
            found = self._inner.evaluate(self._sent("examples", examples), self._sent("labels", labels))
            loss, correct = found if isinstance(found, tuple) else self._device.numbers(found)
            return float(self._device.numbers(loss)), None if correct is None else int(correct)

    def here(self) -> AbstractContextManager[object]:
        return self._device.here()

    def fetched(self, vector: Array) -> Array:
        if self._is_apart:
            return vector
        host = np.empty(vector.shape, vector.dtype)
        with self._device.here():
            self._device.download(vector, host)
        return host

    def close(self) -> None:
        self._device.free()

    def _sent(self, name: str, host: Array) -> Array:
        """What ``host`` holds now, on the device."""
        there = self._copy(name, host)
        self._device.upload(np.ascontiguousarray(host), there)
        return there

    def _copy(self, name: str, host: Array) -> Array:
        """Memory on the device for arrays of this name, shape and type; zeros at first, as between gradients."""
        key = name, host.shape, host.dtype.char
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = self._device.empty(host.shape, host.dtype)
            found[...] = 0
        return found

    def _summing(self, sum_over_workers: SumOverWorkers | None) -> SumOverWorkers | None:
        """``sum_over_workers`` for arrays on the device."""
        if sum_over_workers is None:
            return None

        def sum_by_host(array: Array) -> None:
            host = np.empty(array.shape, array.dtype)
            self._device.download(array, host)
            sum_over_workers(host)
            self._device.upload(host, array)

        return sum_by_host


class Towers(Replica):
    """Copies of the model on several devices, each in a thread of its own; the first in the caller's."""

    def __init__(self, job: Job, layout: Layout, dtype: Any, devices: Sequence[Device]) -> None:
        copies = [_copied(job) for _ in devices[1:]]  # the first has the job's own, which hooks may know
        pairs = zip([(job.model, job.loss), *copies], devices, strict=True)
        self._towers: list[Replica] = [_on_one(*of_job, layout, device) for of_job, device in pairs]
        self._rows = np.zeros((len(devices), layout.size), dtype)
        self._order = np.arange(len(devices))
        self._threads = ThreadPoolExecutor(len(devices) - 1, "tower")
        self._meeting = Meeting(len(devices))
        self._grads = self._rows[0]

    def bind(self, params: Array, grads: Array) -> None:
        self._grads = grads
        for tower, row in zip(self._towers, self._rows, strict=True):
            tower.bind(params, row)

    def refresh(self) -> None:
        self._on_all(lambda index: self._towers[index].refresh())

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        return self._towers[0].evaluate(examples, labels)

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
        for tower in self._towers:
            tower.close()

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
        return _on_one(job.model, job.loss, layout, devices[0])
    return Towers(job, layout, dtype, devices)


def _copied(job: Job) -> tuple[Layer, Loss]:
    try:
        return copy.deepcopy((job.model, job.loss))
    except Exception as error:
        raise JobError(
            f"--devices-per-rank: the model cannot be copied for each device ({error}); "
            "have its layers hold nothing but arrays and values, or give one device a rank"
        ) from error


def _on_one(model: Layer, loss: Loss, layout: Layout, device: Device) -> Replica:
    return (Offloaded if device.apart else Single)(model, loss, layout, device)
