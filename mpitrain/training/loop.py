"""The training loop of a worker, the same in every mode."""

from __future__ import annotations

import atexit
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..comm.cluster import Cluster
from ..core import activity
from ..core.layout import Array
from ..data import BatchSource
from ..models.accumulation import GradientAccumulation
from ..models.base import Model
from ..monitor.console import Console
from ..monitor.metrics import MetricsFile
from ..monitor.run_record import RunRecord
from ..monitor.trace import span
from ..plan.hook import Hook
from ..plan.plan import Plan
from ..plan.progress import ConsistentPoint, WorkItem
from ..strategy.base import Strategy

STEP, LOAD, FORWARD, BACKWARD, HOOKS = map(span, ("step", "load", "forward", "backward", "hooks"))


@dataclass
class RunFiles:
    """The files that a run writes; all except ``folder`` exist only on the chief.

    Attributes:
        folder: The run directory.
        console: None on other ranks.
        record: None on other ranks.
        metrics: None on other ranks, and until the run directory may be written.
    """

    folder: Path
    console: Console | None = None
    record: RunRecord | None = None
    metrics: MetricsFile | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


class Loop:
    """The training loop. Hooks get it as ``plan.hook.TrainingLoop``.

    Args:
        accumulation: Computes gradients with ``model``.
        loader: Makes the training batches.
        hooks: Called in this order.

    Attributes:
        cluster, plan: As given.
        validation: The latest validation metrics.
        validation_step, measured_step: See ``TrainingLoop``.
        paused_s: See ``TrainingLoop``.
        compute_s, waiting_s: See ``TrainingLoop``.
        reuses_batches: Whether no other code keeps a batch, so that its memory can be used again.
        shows_vectors: Whether other code may keep views of the vectors.
        common: Returns the common parameters of learners, shape (layout.size,), or None if this run is not a learner.
            Collective over the workers.
        measured: Returns the number of steps of the parameters that a validation at a step measures. Those of learners
            are the common ones, which may contain a part of a step. Local.
    """

    reuses_batches = True
    shows_vectors = False

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        strategy: Strategy,
        model: Model,
        accumulation: GradientAccumulation,
        loader: BatchSource,
        files: RunFiles,
        hooks: Sequence[Hook],
    ) -> None:
        self.cluster, self.plan = cluster, plan
        self._strategy, self._model, self._accumulation = strategy, model, accumulation
        self._loader, self._files, self._hooks = loader, files, hooks
        self._after_step = _defined(hooks, "after_step")
        methods = _defined(hooks, "at_consistent_point")
        self._at_consistent_point = [(method, _purpose(method.__self__)) for method in methods]  # type: ignore[attr-defined]
        self.common: Callable[[], Array | None] = lambda: None
        self.measured: Callable[[int], float] = float
        self.validation: dict[str, float] = {}
        self.validation_step, self._measured = -1, -1.0
        self._unprinted: dict[str, float] = {}  # recorded by ``log``
        self._stop_reason: str | None = None
        self._began, self.paused_s = time.perf_counter(), defaultdict[str, float](float)
        self.compute_s = self.waiting_s = self._step_began = 0.0
        self._bound = strategy.params
        model.bind(strategy.params, strategy.grads)
        self._defer_params()

    def _defer_params(self) -> None:
        """Let parameters arrive from other nodes while the model computes, if model and strategy can do so.

        This is not done if hooks may read the parameters. Waiting is collective over the node, but a hook may read the
        parameters on one rank only.
        """
        model = self._model
        is_read = self.plan.config.output.histogram_steps or any(map(_is_own, self._hooks))
        if not is_read and model.can_await_params and (wait := self._strategy.late_params()) is not None:
            model.await_params_by(wait)

    @classmethod
    def free(cls, close: Callable[[], None]) -> None:
        """Free the memory of the vectors: now, or when the process ends if other code may keep views of them.

        Collective over all ranks, when the memory is freed.

        Args:
            close: The method of the strategy, or of a server, that frees the memory.
        """
        if cls.shows_vectors:
            atexit.register(close)
        else:
            close()

    @property
    def step(self) -> int:
        """Number of completed steps; over all workers in modes with servers."""
        return self._strategy.progress.step

    @property
    def data_cursor(self) -> int:
        """Number of examples that all workers have taken from the endless stream of examples."""
        return self._strategy.progress.data_cursor

    @property
    def train_steps(self) -> int:
        """The step at which training ends."""
        return self.plan.train_steps

    @property
    def measured_step(self) -> int:
        """The number of steps of the parameters that the last validation has measured."""
        return math.ceil(self._measured)

    @property
    def recorded_step(self) -> int:
        """The step in the status of the run: at the end of a learner, the common parameters may have more steps."""
        return max(self.step, math.ceil(self.measured(self.step)))

    @property
    def loss(self) -> float:
        """Mean loss of the last step over its examples, as known to this worker; NaN before the first step.

        If the parameters are on a GPU, reading the loss waits for the GPU.
        """
        return self._strategy.result.loss

    @property
    def skipped(self) -> bool:
        """Whether the last gradient was discarded: too late, or the loss (or gradient in float16) was not finite."""
        return not self._strategy.result.updated

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step."""
        return self.plan.optimizer.rate(max(self.step - 1, 0))

    @property
    def params(self) -> Array:
        """The parameters that the model computes with, shape (layout.size,); read-only."""
        return self._model.to_host(self._strategy.params)

    @property
    def grads(self) -> Array:
        """This worker's last gradient, as modified by the strategy, shape (layout.size,); read-only."""
        return self._model.to_host(self._strategy.grads)

    @property
    def training_s(self) -> float:
        """Seconds since the beginning of training, without validation and saving."""
        return time.perf_counter() - self._began - sum(self.paused_s.values())

    def stop(self, reason: str = "requested by a hook") -> None:
        """Finish training early; all workers stop soon. Local; one rank is enough."""
        if self._stop_reason is None:
            self._stop_reason = reason
            self._strategy.request_stop()

    def request_pause(self, reason: str) -> None:
        """Request a ``ConsistentPoint`` as soon as possible. Local; no effect except on the chief."""
        if self.cluster.chief:
            self._strategy.request_pause(reason)

    def report(self, step: int, values: dict[str, float], show: bool = True, record: bool = True) -> None:
        """Print (``show``) values measured at ``step``, and write them to the metrics (``record``). Chief only."""
        if show and self._files.console is not None:
            self._files.console.measured(step, {**values, **self._unprinted})
            self._unprinted.clear()
        if record and self._files.metrics is not None:
            self._files.metrics.write(step, time.perf_counter() - self._began, values)

    def log(self, values: dict[str, float]) -> None:
        """Record a script's values at the current step; the next report prints them. Local; chief only."""
        self.report(self.step, values, show=False)
        self._unprinted |= values

    def add_validation(self, step: int, values: dict[str, float]) -> None:
        """Record validation metrics of ``step``, in addition to others of the same parameters. Local."""
        if (measured := self.measured(step)) != self._measured:
            self.validation, self.validation_step, self._measured = {}, step, measured
        self.validation = {**self.validation, **values}
        self.report(self.measured_step, values)

    def show_params(self) -> None:
        """Show the parameters to a script after they were changed between two steps. Local."""

    @property
    def synchronous(self) -> bool:
        """Whether all workers take the same steps."""
        return self._strategy.synchronous

    @property
    def is_stopping(self) -> bool:
        """Whether training ends before its last step, as the workers have agreed."""
        return self._strategy.has_ended and self.step < self.train_steps

    @property
    def stop_reason(self) -> str | None:
        """Why a hook has called ``stop`` on this worker; None if no hook has."""
        return self._stop_reason

    def run(self) -> None:
        """Train until ``train_steps``, or until the strategy is asked to stop. Collective over the workers.

        Raises:
            NonFiniteLoss: The loss is not finite and ``--nan`` is ``stop``.
        """
        self._begin()
        # An overflow makes the loss non-finite, which ``--nan`` handles.
        with np.errstate(all="ignore"):
            while (work := self._next()) is not None:
                self._step(work)
        self._end()

    def _begin(self) -> None:
        self._began = time.perf_counter()
        self.paused_s.clear()
        for hook in self._hooks:
            hook.begin(self)
        activity.become("wait")  # between steps

    def _end(self) -> None:
        activity.become("end")
        for hook in self._hooks:
            hook.end(self)

    def _next(self) -> WorkItem | None:
        """Return the next work item; None at the end. Calls the hooks at consistent points; may wait for workers."""
        while isinstance(work := self._strategy.next(), ConsistentPoint):
            self._pause(work)
        self._step_began = time.perf_counter()
        return work

    def _pause(self, point: ConsistentPoint) -> None:
        """Call the hooks at a consistent point."""
        began = time.perf_counter()
        with HOOKS:
            for at_consistent_point, purpose in self._at_consistent_point:
                at_consistent_point(self, point)
                now = time.perf_counter()
                self.paused_s[purpose] += now - began
                began = now

    def _step(self, work: WorkItem) -> None:
        """Compute one gradient of this worker, or of each worker that trains in turn on this rank, and submit it."""
        strategy, model = self._strategy, self._accumulation
        with STEP, self._model.activate():
            for index in range(work.batches):
                if work.batches > 1 and strategy.params is not self._bound:  # another worker has its turn
                    self._bound = strategy.params
                    self._model.bind(strategy.params, strategy.grads)
                with LOAD:
                    batch = self._loader.batch(*work.batch(index))
                with FORWARD:
                    loss = model.forward(batch, work.micro_batches, begins_step=index == 0)
                if loss is not None:
                    self._submit(loss)
            strategy.end_step(updated=True, complete=True)
        with HOOKS:
            for after_step in self._after_step:
                after_step(self)

    def _submit(self, loss: Any) -> None:
        """Compute and submit the gradient of the batches whose loss was computed."""
        strategy = self._strategy
        self.compute_s += time.perf_counter() - self._step_began
        strategy.begin(loss)  # a loss that is not finite is known before any update
        with BACKWARD:
            self._accumulation.backward(on_ready=strategy.ready)  # announces finished ranges, last layer first
        strategy.average()
        strategy.update()
        self._step_began = time.perf_counter()


def _defined(hooks: Sequence[Hook], method: str) -> list[Callable[..., None]]:
    """Return this method of the hooks that define it: a call of an empty method takes time, too."""
    return [getattr(hook, method) for hook in hooks if getattr(type(hook), method) is not getattr(Hook, method)]


def _purpose(hook: Hook) -> str:
    """Return what the time of a hook at consistent points goes into; see ``monitor.goodput.KINDS``."""
    return "hooks" if _is_own(hook) else getattr(hook, "purpose", "hooks")


def _is_own(hook: Hook) -> bool:
    """Return whether a hook is the user's own."""
    return not type(hook).__module__.startswith("mpitrain.")
