"""Several devices per rank: a replica of the model on each.

The batch is split among the devices. Every device computes the gradient of its part with a copy of the model. The
gradients are summed in the order of the devices. (Krizhevsky, One weird trick for parallelizing convolutional neural
networks, 2014, section 3.1, within a rank.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import numpy as np

from ..core.extra_state import ExtraState
from ..core.kernels import sum_rows
from ..core.layout import Array, page_aligned, row_stride
from ..core.ranges import OnReady, announce_nothing, split_batch
from ..core.training_state import TrainingState
from ..data.batch import Batch
from ..nn.layer import SumOverWorkers
from ..plan.metric import Totals
from .base import Model, OnOutputs

T = TypeVar("T")


class Exchange(Protocol):
    """How the replicas get parameters, and how their losses and gradients are summed. Local."""

    def bind(self, models: Sequence[Model], params: Array, grads: Array) -> None:
        """Bind each replica to memory for its parameters and gradient; ``sum_grads`` writes to ``grads``."""

    def send_params(self) -> None:
        """Copy the values that have changed since the last step to the replicas' devices."""

    def sum_losses(self, losses: list[Any]) -> Any:
        """Return the sum of the replicas' losses, in the form of ``Model.compute_loss``."""

    def sum_grads(self) -> None:
        """Set the bound gradient to the sum of the replicas' gradients, in their order."""


class HostExchange:
    """All replicas read the same parameters in host memory, and write their gradients to rows in host memory."""

    def __init__(self, count: int, size: int, dtype: np.dtype[Any]) -> None:
        self._size, self._order = size, np.arange(count)
        # Each row has its own pages: a GPU may page-lock it.
        self._rows = page_aligned((count, row_stride(size)), dtype)

    def bind(self, models: Sequence[Model], params: Array, grads: Array) -> None:
        self._grads = grads
        for model, row in zip(models, self._rows, strict=True):
            model.bind(params, row[: self._size])

    def send_params(self) -> None:
        """Do nothing: each replica reads the parameters."""

    def sum_losses(self, losses: list[Any]) -> Any:
        return sum(float(loss) for loss in losses)

    def sum_grads(self) -> None:
        sum_rows(self._rows, self._order, 0, self._size, 1.0, self._grads)


class Replicas(Model):
    """Copies of a model on several devices, one thread each; the first runs in the caller's thread.

    Args:
        models: The replicas. The parameters that the first replica freezes are frozen in all replicas.
        state: The state of the first replica.
        allreduce: Sums small arrays over the replicas; their layers use it.
    """

    def __init__(
        self, models: Sequence[Model], state: TrainingState, exchange: Exchange, allreduce: ReplicaAllreduce
    ) -> None:
        self._models, self._state, self._exchange, self._allreduce = models, state, exchange, allreduce
        self.accepts_raw = models[0].accepts_raw
        self._threads = ThreadPoolExecutor(len(models) - 1, "replica")

    def bind(self, params: Array, grads: Array) -> None:
        self._exchange.bind(self._models, params, grads)

    def load_params(self) -> None:
        first, *others = self._models
        self._exchange.send_params()
        first.load_params()
        for model in others:
            model.freeze(self._state.frozen)
            model.load_params()

    def begin_step(self, batch: Batch) -> None:
        parts = self._parts(batch)
        self._on_all(lambda index: self._models[index].begin_step(parts[index]))

    def compute_loss(self, batch: Batch) -> Any:
        parts = self._parts(batch)
        return self._exchange.sum_losses(self._on_all(lambda index: self._models[index].compute_loss(parts[index])))

    def compute_grads(self, on_ready: OnReady) -> None:
        self._on_all(lambda index: self._models[index].compute_grads(announce_nothing))
        self._exchange.sum_grads()

    def evaluate(self, batch: Batch, on_outputs: OnOutputs | None = None) -> Totals:
        return self._models[0].evaluate(batch, on_outputs)

    def predict(self, batch: Batch) -> Array:
        return self._models[0].predict(batch)

    def add_loss(self, total: Any, loss: Any) -> Any:
        return self._models[0].add_loss(total, loss)

    def extra_state(self) -> ExtraState:
        return self._models[0].extra_state()

    def load_extra_state(self, state: ExtraState) -> None:
        for model in self._models:
            model.load_extra_state(state)

    def has_room(self, examples: Array, labels: Array) -> bool:
        return all(model.has_room(examples, labels) for model in self._models)

    def cache_dataset(self, examples: Array, labels: Array) -> None:
        for model in self._models:  # each replica takes a part of a batch, of any examples
            model.cache_dataset(examples, labels)

    def memory_use(self) -> dict[str, int]:
        return self._models[0].memory_use()

    def activate(self) -> AbstractContextManager[object]:
        return self._models[0].activate()

    def to_host(self, vector: Array) -> Array:
        return self._models[0].to_host(vector)

    def close(self) -> None:
        self._threads.shutdown()
        for model in self._models:
            model.close()

    def _parts(self, batch: Batch) -> list[Batch]:
        return [batch.part(*ends) for ends in split_batch(batch.count, len(self._models))]

    def _on_all(self, work: Callable[[int], T]) -> list[T]:
        """Return the result of ``work`` for each replica; if replicas fail, raise the original error."""

        def guarded(index: int) -> T:
            try:
                with np.errstate(all="ignore"):  # same as in the training loop; threads do not inherit it
                    return work(index)
            except BaseException:
                self._allreduce.abort()
                raise

        futures = [self._threads.submit(guarded, index) for index in range(1, len(self._models))]
        done: list[Future[T]] = [Future(), *futures]
        try:
            done[0].set_result(guarded(0))
        except BaseException as error:
            done[0].set_exception(error)
        errors = [failed for future in done if (failed := future.exception()) is not None]
        for failed in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise failed
        return [future.result() for future in done]


class ReplicaAllreduce:
    """Sums small arrays over a rank's replicas, and over the workers if requested.

    Args:
        count: The number of replicas.
        sum_over_workers: Sums an array over all workers, in place; None if there is only one worker.
    """

    def __init__(self, count: int, sum_over_workers: SumOverWorkers | None) -> None:
        self._barrier, self._sum_over_workers = threading.Barrier(count), sum_over_workers
        self._parts: list[Array] = [np.empty(0)] * count

    def summing(self, index: int) -> SumOverWorkers:
        """Return an in-place sum for the replica ``index``. All replicas must call it; the first communicates."""

        def sum_over_replicas(array: Array) -> None:
            self._parts[index] = array
            self._barrier.wait()
            if index == 0:
                total = np.sum(self._parts, axis=0)
                if self._sum_over_workers is not None:
                    self._sum_over_workers(total)
                self._parts = [total] * len(self._parts)
            self._barrier.wait()
            total = self._parts[index]
            self._barrier.wait()
            array[...] = total

        return sum_over_replicas

    def abort(self) -> None:
        """Raise an error in waiting replicas, because one replica has failed and will not arrive."""
        self._barrier.abort()
