"""The training loop of a worker, the same in every mode."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..comm.cluster import Cluster
from ..comm.mpi import MPI
from ..comm.shared_dataset import SharedDataset
from ..core.layout import Array
from ..core.ranges import split_batch
from ..core.renamed import Renamed
from ..data import Loader
from ..errors import CheckpointError, NonFiniteLoss
from ..models.base import Model
from ..monitor.console import Console
from ..monitor.metrics import MetricsFile
from ..nn.layer import Context
from ..plan.hook import Hook
from ..plan.job import Job
from ..plan.plan import Plan
from ..strategy.base import Strategy, Totals, Turn, WorkItem, Wrap
from . import evaluation as validation
from .checkpointing import Checkpointing
from .hooks import Log, Save, Validate
from .initial_state import InitialStateLoader


@dataclass
class RunFiles:
    """Where a run writes; all but the folder exist only on the chief.

    Attributes:
        folder: The run directory.
        console: None on other ranks.
        metrics: None on other ranks.
        record: Tables that are stored with every checkpoint.
    """

    folder: Path
    console: Console | None
    metrics: MetricsFile | None
    record: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


class Loop:
    """Trains a job; the interface that hooks see.

    Construction, ``run`` and ``free`` are collective over the workers, as are the methods marked so.

    Attributes:
        cluster, job, plan, files: As given.
        train_steps, layout, step_examples: Of the plan.
        saving: Saves checkpoints.
        resumed: The checkpoint that this run resumes from, or None.
        saved: Whether that checkpoint is this run's own and need not be saved again.
        training_s: Seconds spent in training steps, without validation and saving.
        validation: The latest validation metrics.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        plan: Plan,
        strategy: Strategy,
        model: Model,
        files: RunFiles,
        start: InitialStateLoader,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.cluster, self.job, self.plan, self.files = cluster, job, plan, files
        self.train_steps, self.layout, self.step_examples = plan.train_steps, plan.layout, plan.step_examples
        self.resumed, self.saved = start.resumed, start.saved
        self._strategy, self._model = strategy, model
        self.training_s = 0.0
        self.validation: dict[str, float] = {}
        self._validated_at = -1
        workers = cluster.workers
        self._context = Context(
            training=True,
            seed=plan.config.seed,
            weight=plan.weight,
            sum_over_workers=_summing(workers) if workers.size > 1 else None,
        )
        self._micro_batches = split_batch(plan.batch, plan.config.accumulate_steps)
        self._accumulated: Any = None
        self._announced: Any = None  # a loss not yet passed to the strategy
        self._data = SharedDataset(cluster.training, plan.config.shared_memory)
        self._train = self._loader(job.train, None if model.accepts_raw else plan.dtype, model.memory)
        self._validation = None if job.validation is None else self._loader(job.validation, plan.dtype)
        self._background_evaluator = self._make_background_evaluator()
        self._bind()
        model.scale_loss(strategy.loss_scale)
        self._forward, self._backward = model.forward, model.backward
        self._watch_backward()
        self.saving = Checkpointing(cluster, plan, strategy, files.checkpoints, files.record, self.say)
        self._save = Save(plan.config.save_steps, plan.config.save_secs)
        self._hooks: list[Hook] = [Log(plan.config.log_steps), Validate(plan.config.validate_steps), self._save]
        self._hooks += [*hooks, *job.hooks]

    @property
    def step(self) -> int:
        """Number of completed steps; over all workers in the asynchronous modes."""
        return self._strategy.step

    @property
    def data_cursor(self) -> int:
        """Number of examples that all workers have taken from the endless stream of examples."""
        return self._strategy.data_cursor

    position = Renamed("data_cursor")

    @property
    def loss(self) -> float:
        """Mean loss of the last step over its examples, as far as this worker knows it; NaN before the first step.

        If parameters live on a GPU, reading it synchronizes with the GPU.
        """
        return self._strategy.result.loss

    @property
    def skipped(self) -> bool:
        """Whether the last gradient was discarded because its loss was not finite or it came too late."""
        return not self._strategy.result.updated

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step."""
        return self.plan.optimizer.rate(max(self.step - 1, 0))

    @property
    def lockstep(self) -> bool:
        """Whether all workers are at the same step."""
        return self._strategy.lockstep

    @property
    def settled(self) -> bool:
        """Whether all workers have the same parameters."""
        return self._strategy.settled

    def run(self) -> None:
        """Train until ``train_steps``, or until a hook stops the run.

        Raises:
            NonFiniteLoss: The loss is not finite and ``--nan`` is ``stop``.
        """
        self._began = time.perf_counter()
        if self.files.console is not None:
            self.files.console.start(self.step, self.train_steps)
        try:
            # An overflow shows in the loss, for which there is a policy.
            with np.errstate(all="ignore"):
                self._run()
        except NonFiniteLoss as error:
            if error.on_all_ranks:  # all ranks end regularly, so a sharded save in progress must be finished
                with contextlib.suppress(CheckpointError):  # already reported
                    self.saving.finish()
            raise
        if self.files.console is not None:
            self.files.console.stop()

    def _run(self) -> None:
        for hook in self._hooks:
            hook.begin(self)
        while True:
            began = time.perf_counter()
            turn = self._strategy.next()
            if turn is Turn.END:
                break
            if isinstance(turn, WorkItem):
                self._compute(turn)
                self.training_s += time.perf_counter() - began
                self._after_step()
            else:
                self._save.paused(self)
        self._strategy.close()
        self._report_memory()
        if self.files.console is not None:
            self.files.console.advance(self.step)
        for hook in self._hooks:
            hook.end(self)

    def _report_memory(self) -> None:
        """Record the device's memory use by purpose."""
        found = self._model.memory_use()
        if found and self._strategy.on_device:
            vectors = (len(self.plan.vectors) + 1) * self.plan.nbytes
            found = {"parameters, slots, gradient": vectors, **found}
        if found:
            self.report_record({"device_memory": found})

    def _after_step(self) -> None:
        for hook in self._hooks:
            hook.after_step(self)
        if self.files.console is not None:
            self.files.console.advance(self.step)

    @property
    def params(self) -> Array:
        """The parameters that the model computes with, shape (layout.size,); read-only."""
        return self._model.to_host(self._strategy.params)

    @property
    def grads(self) -> Array:
        """This worker's last gradient, as modified by the strategy, shape (layout.size,); read-only."""
        return self._model.to_host(self._strategy.grads)

    def add_hook(self, hook: Hook) -> None:
        """Add a hook after the others; call before ``run``, and on every worker if the hook communicates."""
        self._hooks.append(hook)

    def trace(self, wrap: Wrap, background: Callable[[str], Wrap]) -> None:
        """Record the phases of every step, and background threads. Local; call before ``run``.

        Args:
            background: Returns the wrapper that records the thread of a given name.
        """
        for owner, method, kind in (
            (self, "_compute", "step"),
            (self, "_forward", "forward"),
            (self, "_backward", "backward"),
            (self.saving, "save", "save"),
            (self, "validate_now", "validate"),
            (self, "validate_at_end", "validate"),
            (self._train, "batch", "load"),
        ):
            wrap(owner, method, kind)
        self._model.trace()
        self._strategy.trace(wrap)
        self.saving.trace(background)
        if self._background_evaluator is not None:
            background("validation")(self._background_evaluator, "measure", "validate")

    def stop(self) -> None:
        """Ask all workers to stop soon. Local; one rank is enough."""
        self._strategy.stop()

    def pause_at(self, step: int) -> None:
        """In the asynchronous modes: pause all workers at ``step``, for a checkpoint of exactly that step."""
        self._strategy.pause_at(step)

    def pause_soon(self) -> None:
        """Ask the workers to reach a step at which a checkpoint can be taken; chief only."""
        self._strategy.pause_soon()

    @property
    def paused(self) -> bool:
        """In lockstep: whether this is the step requested by ``pause_soon``."""
        return self._strategy.paused

    def totals(self) -> Totals:
        """Return the totals of all workers since the run began; on the chief. Local."""
        began = time.perf_counter()
        found = self._strategy.totals()
        self.training_s += time.perf_counter() - began  # includes steps that the GPU had not finished
        return found

    def report(self, step: int, values: dict[str, float]) -> None:
        """Print and record values measured at ``step``. Local; only the chief writes."""
        if self.files.console is not None and self.files.metrics is not None:
            self.files.console.measured(step, values)
            self.files.metrics.write(step, time.perf_counter() - self._began, values)

    def report_record(self, record: Mapping[str, Any]) -> None:
        """Add a line to the metrics. Local; only the chief writes."""
        if self.files.metrics is not None:
            self.files.metrics.write(self.step, time.perf_counter() - self._began, record)

    def say(self, line: str) -> None:
        """Print a line. Local; only the chief prints."""
        if self.files.console is not None:
            self.files.console.say(line)

    def validate_now(self) -> None:
        """Validate with the current parameters, or their moving averages if there are any.

        In lockstep, all workers validate. Otherwise the chief validates in the background, and skips this validation if
        the previous one has not ended.
        """
        if self.lockstep:
            self._report_validation(self.step, self.validate())
        elif self._background_evaluator is not None and not self._background_evaluator.busy:
            self.report_validation()
            step = self.step
            self._background_evaluator.start(self._strategy.gather(self._validated), step)

    def report_validation(self) -> None:
        """Report a finished background validation, if any. Local."""
        found = None if self._background_evaluator is None else self._background_evaluator.found()
        if found is not None:
            self._report_validation(found.step, found.values)

    def validate_at_end(self) -> None:
        """Validate on all workers at the end of training. Collective over the workers."""
        found = None if self._background_evaluator is None else self._background_evaluator.wait()
        if found is not None:
            self._report_validation(found.step, found.values)
        if self.cluster.workers.bcast(self._validated_at != self.step, root=0):  # only the chief's value is current
            self._report_validation(self.step, self.validate())

    def validate(self) -> dict[str, float]:
        """Return mean loss and accuracy on the validation examples, split over workers. Collective over the workers."""
        if self._validation is None:
            return {}
        workers, count = self.cluster.workers, len(self._validation)
        start, stop = (count * (workers.rank + i) // workers.size for i in (0, 1))
        self._model.bind(self._strategy.on_device_copy(self._validated), self._strategy.grads)
        self._model.refresh()
        sums = validation.measure(self._model.evaluate, self._validation, start, stop, self._most)
        self._bind()
        everyone = np.empty((workers.size, 3))
        workers.Allgather(sums, everyone)
        return validation.measured(everyone.sum(axis=0), count)

    def free(self) -> None:
        """Free memory; nothing else may be called afterwards. Collective over all ranks."""
        self._model.close()
        self._train.close()
        if self._validation is not None:
            self._validation.close()
        self._strategy.free()
        self._data.free()

    def _compute(self, work: WorkItem) -> None:
        """Compute one gradient of this worker and submit it."""
        loss: Any = 0.0
        self._model.refresh()
        self._keeps = False
        for index, (start, stop) in enumerate(self._micro_batches):
            examples, labels = self._train.batch(work.position + start, stop - start)
            self._context.position = work.position + start
            part = self._forward(examples, labels, self._context)
            if len(self._micro_batches) == 1:
                loss = part
            else:
                with self._model.activate():
                    loss = loss + part  # a copy: a device's result is valid only until the next micro-batch
            last = index == len(self._micro_batches) - 1
            if last:
                self._begin(loss)
            self._backward()
            self._watching = False
            if not last:
                self._accumulate()
        self._backward_reached(0)
        # In the asynchronous modes this is a guess, which suffices to prefetch the right part of a file.
        self._train.expect(work.position + self.step_examples, self._micro_batches[0][1])
        self._strategy.finish()

    def _begin(self, loss: Any) -> None:
        """Pass the loss to the strategy: immediately, or with the gradient if reading it would block."""
        self._complete_from = self.layout.size
        self._watching = True
        self._announced = None
        if self._strategy.on_device or isinstance(loss, float):
            self._strategy.begin(loss)
        else:
            self._announced = loss

    def _bind(self) -> None:
        """Bind the model to the strategy's parameters."""
        self._model.bind(self._strategy.params, self._strategy.grads)

    def _accumulate(self) -> None:
        """Sum the gradients of all micro-batches but the last."""
        with self._model.activate():
            if self._accumulated is None:
                self._accumulated = self._strategy.grads.copy()
            elif self._keeps:
                self._accumulated += self._strategy.grads
            else:
                self._accumulated[...] = self._strategy.grads
        self._keeps = True

    def _watch_backward(self) -> None:
        """Have the model report when a layer's gradient is ready, so that it can be averaged during backward."""
        self._watching = False
        layer_starts = self.plan.layer_starts
        borders = {bucket.lo for bucket in self.plan.buckets if bucket.lo > 0}
        latest = {start: child for child, start in enumerate(layer_starts) if start in borders}

        def layer_done(child: int) -> None:
            if self._watching:
                self._backward_reached(layer_starts[child])

        self._model.watch(layer_done, {child: start for start, child in latest.items()})

    def _backward_reached(self, start: int) -> None:
        """Pass on that ``grads[start:]`` is final."""
        if start >= self._complete_from:
            return
        if self._announced is not None:
            self._strategy.begin(self._model.loss_value(self._announced))
            self._announced = None
        if self._keeps:
            with self._model.activate():
                self._strategy.grads[start : self._complete_from] += self._accumulated[start : self._complete_from]
        self._complete_from = start
        self.saving.before_update()
        self._strategy.ready(start)

    @property
    def _validated(self) -> str:
        """Name of the vector to validate."""
        return "average" if self._strategy.has_average else "params"

    @property
    def _most(self) -> int:
        """Examples per validation batch: at most a training micro-batch."""
        return max(stop - start for start, stop in self._micro_batches)

    def _report_validation(self, step: int, values: dict[str, float]) -> None:
        self._validated_at = step
        if values:
            self.validation = values
            self.report(step, values)

    def _loader(self, split: Any, dtype: Any, memory: Any = None) -> Loader:
        """Return the batches of a split; in the stored type if ``dtype`` is None."""
        return Loader(split, self._data.load(split), self.plan.config.seed, dtype, memory)

    def _make_background_evaluator(self) -> validation.BackgroundEvaluator | None:
        needed = self.cluster.chief and not self.lockstep and self.plan.config.validate_steps > 0
        if not needed or self._validation is None:
            return None
        return validation.BackgroundEvaluator(self.plan, self.job, self._validation, self._most)


def _summing(workers: MPI.Intracomm) -> Any:
    """Return a sum over the workers whose order does not depend on the MPI library."""

    def sum_over_workers(array: Array) -> None:
        everyone = np.empty((workers.size, *array.shape), array.dtype)
        workers.Allgather(np.ascontiguousarray(array), everyone)
        np.sum(everyone, axis=0, out=array)

    return sum_over_workers
