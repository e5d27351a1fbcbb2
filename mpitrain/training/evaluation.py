"""Loss and accuracy on the validation examples."""

from __future__ import annotations

import numpy as np

from ..comm.cluster import Cluster
from ..core.layout import Array
from ..data import BatchSource
from ..models.base import Model
from ..monitor.trace import span
from ..plan.plan import Plan
from ..strategy.base import Strategy

_WAIT = span("wait")


class Evaluator:
    """Evaluates the parameters, or their moving averages if there are any.

    Args:
        loader: The validation examples.
    """

    def __init__(self, cluster: Cluster, plan: Plan, strategy: Strategy, model: Model, loader: BatchSource) -> None:
        self._workers, self._strategy, self._model, self._loader = cluster.workers, strategy, model, loader
        self._vector = "params" if plan.moving_average is None else "average"
        # Examples per batch: as many as a micro-batch of training.
        self._most = -(-plan.batch // plan.config.training.accumulate_steps)

    @span("validate")
    def evaluate(self) -> dict[str, float]:
        """Return mean loss and accuracy. Collective over the workers, at a ``ConsistentPoint``."""
        workers, count = self._workers, len(self._loader)
        start, stop = (count * (workers.rank + i) // workers.size for i in (0, 1))
        strategy, model = self._strategy, self._model
        with _WAIT:
            vector = strategy.vector(self._vector)
        model.bind(vector, strategy.grads)
        own = self._measure(start, stop)
        model.bind(strategy.params, strategy.grads)
        all_workers = np.empty((workers.size, 3))
        with _WAIT:
            workers.Allgather(own, all_workers)
        loss, correct, batches = all_workers.sum(axis=0).tolist()
        found = {"validation_loss": loss / count}
        return {**found, "validation_accuracy": correct / count} if batches else found

    def _measure(self, start: int, stop: int) -> Array:
        """Evaluate the examples with indices [start, stop). Local.

        Returns:
            Shape (3,), float64: the sum of losses, the number of correct predictions, and the number of batches for
            which that number is known.
        """
        sums = np.zeros(3)
        for lo in range(start, stop, self._most):
            loss, correct = self._model.evaluate(self._loader.sequential(lo, min(lo + self._most, stop)))
            sums += loss, correct or 0, correct is not None
        return sums
