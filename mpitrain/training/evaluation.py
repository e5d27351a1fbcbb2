"""Loss, accuracy and metrics on the validation examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..comm.cluster import Group
from ..core.layout import Array
from ..data import BatchSource
from ..models.base import Model
from ..monitor.trace import span
from ..plan.metric import PREFIX, Metric, Totals, measure_parts
from ..plan.network import Network
from ..plan.plan import Plan
from ..strategy.base import Strategy

_WAIT = span("wait")

# Outputs and labels of batches, by the index of the first example of a batch.
Parts: TypeAlias = dict[int, tuple[Any, Any]]


class Evaluator:
    """Evaluates the parameters, or their moving averages if there are any.

    Args:
        workers: All workers.
        metrics: The metrics that are measured in addition to loss and accuracy.
        loader: The validation examples.
        vector: Returns the values to evaluate by the name of their vector; collective over the workers.
    """

    def __init__(
        self,
        workers: Group,
        plan: Plan,
        strategy: Strategy,
        model: Model,
        network: Network,
        metrics: Mapping[str, Metric],
        loader: BatchSource,
        vector: Callable[[str], Array],
    ) -> None:
        self._values = vector
        self._workers, self._strategy, self._model, self._loader = workers, strategy, model, loader
        self._network, self._metrics = network, metrics
        self._vector = "params" if plan.moving_average is None else "average"
        # Examples per batch: as many as a micro-batch of training.
        self._batch_size = -(-plan.batch // plan.config.training.accumulate_steps)
        self._divides_batches = plan.config.virtual_workers is None

    @span("validate")
    def evaluate(self) -> dict[str, float]:
        """Return mean loss, accuracy and metrics. Collective over the workers, at a ``ConsistentPoint``.

        Raises:
            JobError: No label counts in the loss; or a metric fails, or returns no number.
        """
        comm, count, unit = self._workers.comm, len(self._loader), 1 if self._divides_batches else self._batch_size
        units = -(-count // unit)
        start, stop = (min(units * (comm.rank + i) // comm.size * unit, count) for i in (0, 1))
        strategy, model = self._strategy, self._model
        with _WAIT:
            vector = self._values(self._vector)
        model.bind(vector, strategy.grads)
        parts: Parts = {}
        own = self._measure(start, stop, parts)
        model.bind(strategy.params, strategy.grads)
        with _WAIT:
            all_workers = np.concatenate(
                comm.allgather(own.sum(axis=0, keepdims=True) if self._divides_batches else own)
            )
        with self._workers.agree("computing the validation loss"):
            values = Totals(*all_workers.sum(axis=0).tolist()).means()
        values |= metrics_of(self._workers, self._network.joined, self._metrics, parts)
        return {PREFIX + name: value for name, value in values.items()}

    def _measure(self, start: int, stop: int, parts: Parts) -> Array:
        """Evaluate the examples with indices [start, stop). Local.

        Args:
            parts: Filled with outputs and labels, if there are metrics.

        Returns:
            The ``Totals`` of each batch, shape (n, 4), float64.
        """
        totals: list[Totals] = []
        for lo in range(start, stop, self._batch_size):

            def keep(outputs: Any, labels: Any, lo: int = lo) -> None:
                parts[lo] = outputs, labels

            batch = self._loader.sequential(lo, min(lo + self._batch_size, stop), stop)
            totals.append(self._model.evaluate(batch, keep if self._metrics else None))
        return np.array(totals, np.float64).reshape(-1, len(Totals._fields))


def metrics_of(
    group: Group, join: Callable[[Sequence[Any]], Any], metrics: Mapping[str, Metric], parts: Parts
) -> dict[str, float]:
    """Return metrics of the outputs and labels of all ranks, joined in order. Collective over the group.

    The first rank computes them; it needs twice the memory of the outputs and labels of all ranks.

    Args:
        join: See ``Network.joined``.

    Raises:
        JobError: A metric fails, or returns no number.
    """
    if not metrics:
        return {}
    values: dict[str, float] = {}
    with _WAIT:
        all_parts = _gathered(group, parts)
    with group.agree("computing metrics"):
        if group.comm.rank == 0:
            values = measure_parts(metrics, join, [all_parts[number] for number in sorted(all_parts)])
    with _WAIT:
        return group.comm.bcast(values, root=0)  # type: ignore[no-any-return]


def _gathered(group: Group, parts: Parts) -> Parts:
    """Return the parts of all ranks on the first rank, an empty dict on others; sends one message for each part."""
    comm = group.comm
    counts = comm.gather(len(parts), root=0)
    if counts is None:
        for part in parts.items():
            comm.send(part, dest=0)
        return {}
    received = (comm.recv(source=rank) for rank in range(1, comm.size) for _ in range(counts[rank]))
    return {**parts, **dict(received)}
