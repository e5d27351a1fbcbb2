"""The model as a rank trains it: the loss and the gradient of a batch, on one device or on several.

Several devices work as towers: the batch is cut, every device computes the gradient of its part with a copy of the
model, and the parts' gradients are summed in the order of the devices. (Krizhevsky, One weird trick for parallelizing
convolutional neural networks, 2014, section 3.1, within a rank.)
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ..core.device import CPU, Device
from ..core.kernels import sum_rows
from ..core.layout import Array, Layout
from ..data.split import Split
from ..errors import JobError
from ..nn.container import Sequential
from ..nn.layer import Context, Layer, SumOverWorkers, bind, place
from ..nn.loss import Loss
from ..plan.job import Job
from ..plan.plan import split_batch

T = TypeVar("T")
Say = Callable[[str], None]


class Replica:
    """What computes gradients. Every method is local, but for layers that communicate (see ``Context``).

    Attributes:
        takes_stored: Whether ``forward`` takes examples as they are stored, neither converted nor scaled.
        memory: Gives the memory that the next batch of so many examples is best put in; None where any will do.
    """

    takes_stored = False
    memory: Callable[[int], tuple[Array, Array]] | None = None

    def bind(self, params: Array, grads: Array) -> None:
        """Compute with ``params`` and write to ``grads``, shape (layout.size,) each, from now on."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Take notice of the parameters as they are now; to be called whenever they have changed."""

    def forward(self, examples: Array, labels: Array, context: Context) -> Any:
        """The loss of a batch, weighted by ``context.weight``; shapes as ``Loader.batch`` returns them.

        Returns:
            A number; or where the model computes on a device, an array there that will hold it when the device has
            come so far, and until the next call. See ``number``.
        """
        raise NotImplementedError

    def backward(self) -> None:
        """Assign the gradient of what the last ``forward`` returned."""
        raise NotImplementedError

    def number(self, loss: Any) -> float:
        """What ``forward`` has returned, as a number; waits for it."""
        return float(loss)

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        """The sum of the losses of some examples, and how many are predicted right; see ``Loss.evaluate``."""
        raise NotImplementedError

    def watch(self, told: Callable[[int], None], cuts: Mapping[int, int]) -> None:
        """Have ``told(i)`` called in ``backward`` when the model's children from the i-th on have their gradients.

        A replica may leave that out: all gradients are there when ``backward`` returns.

        Args:
            cuts: Children for which that is worth an interruption, and where the gradients of each begin.
        """

    def scale_loss(self, scale: Array | None) -> None:
        """Have the loss's gradient multiplied by a number on the device; see ``Loss.scale``."""

    def trace(self) -> None:
        """Have ``forward`` and ``backward`` return when they are done, so that their times are those of the work."""

    def footprint(self) -> dict[str, int]:
        """Bytes of a device's memory by what they are for, beside the parameters and what is like them; under ``held``
        all that this process has taken there. Empty where there is no such memory."""
        return {}

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

    def forward(self, examples: Array, labels: Array, context: Context) -> Any:
        loss, gradient = self._loss(self._outputs(examples, context), labels, context.weight)
        self._gradient = self._scaled(gradient)
        return loss

    def backward(self) -> None:
        self._model.backward(self._gradient)

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        return self._loss.evaluate(self._outputs(examples, Context()), labels)

    def watch(self, told: Callable[[int], None], cuts: Mapping[int, int]) -> None:
        if isinstance(self._model, Sequential):
            self._model.after_backward = told

    def _outputs(self, examples: Array, context: Context) -> Array:
        outputs = self._model.forward(examples, context)
        return outputs if self._loss.mixed else self._model.widened(outputs, "outputs")

    def _scaled(self, gradient: Array) -> Array:
        """The loss's gradient times its scale, where it has one and does not know of it."""
        if self._loss.mixed or self._loss.scale is None:
            return gradient
        return self._loss.device.xp.multiply(gradient, self._loss.scale, out=gradient)


class Towers(Replica):
    """Copies of the model on several devices, each in a thread of its own; the first in the caller's."""

    def __init__(self, job: Job, layout: Layout, dtype: Any, devices: Sequence[Device], say: Say) -> None:
        copies = [_copied(job) for _ in devices[1:]]  # the first has the job's own, which hooks may know
        pairs = zip([(job.model, job.loss), *copies], devices, strict=True)
        self._towers: list[Replica] = [_on_one(*of_job, layout, device, job.train, say) for of_job, device in pairs]
        self.takes_stored = self._towers[0].takes_stored
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

    def forward(self, examples: Array, labels: Array, context: Context) -> Any:
        losses = self._forward_all(examples, labels, context)
        return sum(tower.number(loss) for tower, loss in zip(self._towers, losses, strict=True))

    def _forward_all(self, examples: Array, labels: Array, context: Context) -> list[Any]:
        """What each tower's ``forward`` returns for its part of a batch."""
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


def replica_of(
    job: Job, layout: Layout, dtype: Any, devices: Sequence[Device] = (CPU,), say: Say = lambda line: None
) -> Replica:
    """The replica of a rank that computes on ``devices``.

    Args:
        say: Takes a line for the user.
    """
    if len(devices) == 1:
        return _on_one(job.model, job.loss, layout, devices[0], job.train, say)
    if devices[0].apart:
        from .towers_gpu import GpuTowers

        return GpuTowers(job, layout, dtype, devices, say)
    return Towers(job, layout, dtype, devices, say)


def _copied(job: Job) -> tuple[Layer, Loss]:
    try:
        return copy.deepcopy((job.model, job.loss))
    except Exception as error:
        raise JobError(
            f"--devices-per-rank: the model cannot be copied for each device ({error}); "
            "have its layers hold nothing but arrays and values, or give one device a rank"
        ) from error


def _on_one(model: Layer, loss: Loss, layout: Layout, device: Any, split: Split, say: Say) -> Replica:
    if not device.apart:
        return Single(model, loss, layout, device)
    from .native_gpu import OnGpu

    return OnGpu(model, loss, layout, device, split, say)
