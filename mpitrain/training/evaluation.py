"""Loss and accuracy on the validation examples: on all workers, or in a background thread on a snapshot."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..core.device import CPU
from ..core.layout import Array
from ..data import Loader
from ..nn.layer import Context, bind, place
from ..plan.job import Job
from ..plan.plan import Plan

# Maps examples and labels to the sum of their losses and the number of correct predictions; see ``Loss.evaluate``.
Evaluate = Callable[[Array, Array], tuple[float, "int | None"]]


def measure(evaluate: Evaluate, loader: Loader, start: int, stop: int, most: int) -> Array:
    """Evaluate the examples with indices [start, stop), at most ``most`` at a time. Local.

    Returns:
        Shape (3,), float64: the sum of losses, the number of correct predictions, and the number of batches for which
        that number is known.
    """
    sums = np.zeros(3)
    for lo in range(start, stop, most):
        examples, labels = loader.sequential(lo, min(lo + most, stop))
        loss, correct = evaluate(examples, labels)
        sums += loss, correct or 0, correct is not None
    return sums


def measured(sums: Array, count: int) -> dict[str, float]:
    """Convert sums over ``count`` examples to metrics."""
    found = {"validation_loss": float(sums[0]) / count}
    if sums[2]:
        found["validation_accuracy"] = float(sums[1]) / count
    return found


@dataclass(frozen=True)
class Evaluation:
    """Validation metrics and the step of the parameters that they belong to."""

    step: int
    values: dict[str, float]


class BackgroundEvaluator:
    """Validates in a thread on the CPU, with its own copy of the model on a snapshot of the parameters. Local.

    Construct it before the job's model has computed anything.

    Args:
        most: Examples per batch.
    """

    def __init__(self, plan: Plan, job: Job, loader: Loader, most: int) -> None:
        self._loader, self._most = loader, most
        self._model, self._loss = copy.deepcopy((job.model, job.loss))
        place(self._model, CPU)
        self._loss.device = CPU
        self._snapshot = np.zeros(plan.layout.size, plan.dtype)
        bind(self._model, plan.layout, self._snapshot, np.zeros_like(self._snapshot))
        self._thread: threading.Thread | None = None
        self._found: Evaluation | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether the last snapshot is still being evaluated."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, params: Array, step: int) -> None:
        """Copy the parameters and start to evaluate them; the previous evaluation must have ended."""
        self._snapshot[:] = params
        self._thread = threading.Thread(target=self.measure, args=(step,), name="validation", daemon=True)
        self._thread.start()

    def found(self) -> Evaluation | None:
        """Return the result of the last evaluation, once; None if there is none yet."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        if self._error is not None:
            raise self._error
        found, self._found = self._found, None
        return found

    def wait(self) -> Evaluation | None:
        """Wait for the evaluation in progress, if any, and return its result."""
        if self._thread is not None:
            self._thread.join()
        return self.found()

    def _evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        return self._loss.evaluate(self._model.forward(examples, Context()), labels)

    def measure(self, step: int) -> None:
        """Evaluate the snapshot; runs in the thread."""
        try:
            with np.errstate(all="ignore"):  # an overflow shows in the loss
                count = len(self._loader)
                sums = measure(self._evaluate, self._loader, 0, count, self._most)
            self._found = Evaluation(step, measured(sums, count))
        except BaseException as error:
            self._error = error
