"""The training loop: what every worker does, whatever the mode."""

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
from ..core.layout import Array, Layout
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
    """Where a run writes; all but the folder is the chief's.

    Attributes:
        folder: The run directory.
        console: None on other ranks, like ``metrics``.
        record: What is kept of the run with every checkpoint, in tables.
    """

    folder: Path
    console: Console | None
    metrics: MetricsFile | None
    record: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


class Loop:
    """Trains a job; what hooks see of it.

    Construction, ``run`` and ``free`` are collective over the workers, and so is what is said to be.

    Attributes:
        cluster, job, plan, files: What was given.
        saving: Saves checkpoints.
        resumed: The checkpoint that this run goes on from, or None.
        saved: Whether that is one of this run's own, which need not be saved again.
        training_s: Seconds spent in training steps, without validation and saving.
        validation: What was last measured on the validation examples.
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
        self._announced: Any = None  # the loss, as long as the strategy does not know it
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
        """Steps done, by all workers together where they have no common pace."""
        return self._strategy.step

    @property
    def data_cursor(self) -> int:
        """Examples taken by all workers together from the endless stream of examples."""
        return self._strategy.data_cursor

    position = Renamed("data_cursor")

    @property
    def loss(self) -> float:
        """The last step's mean loss over its examples, as far as this worker knows it; NaN before the first.

        Where parameters live on a GPU, whoever asks waits for it, and the GPU for what comes then.
        """
        return self._strategy.result.loss

    @property
    def skipped(self) -> bool:
        """Whether the last gradient was left out, since its loss was not finite or it came too late."""
        return not self._strategy.result.updated

    @property
    def train_steps(self) -> int:
        return self.plan.train_steps

    @property
    def step_examples(self) -> int:
        """Examples of a step, of all gradients that it takes."""
        return self.plan.step_examples

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def learning_rate(self) -> float:
        """Of the last step."""
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
        """Train until ``train_steps``, or until a hook says stop.

        Raises:
            NonFiniteLoss: The loss is not finite and the run is to stop then.
        """
        self._began = time.perf_counter()
        if self.files.console is not None:
            self.files.console.start(self.step, self.train_steps)
        try:
            # What overflows shows in the loss, for which there is a policy.
            with np.errstate(all="ignore"):
                self._run()
        except NonFiniteLoss as error:
            if error.on_all_ranks:  # then all end in order, and nothing may be under way: a save in parts may be
                with contextlib.suppress(CheckpointError):  # which has been told
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
        """Record what the device's memory was used for."""
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
        """What the model computes with, shape (layout.size,); not to be written."""
        return self._model.to_host(self._strategy.params)

    @property
    def grads(self) -> Array:
        """What this worker's last gradient has become, shape (layout.size,); not to be written."""
        return self._model.to_host(self._strategy.grads)

    def add_hook(self, hook: Hook) -> None:
        """Have one more hook called, after the others; before ``run``, and where it communicates on every worker."""
        self._hooks.append(hook)

    def trace(self, wrap: Wrap, background: Callable[[str], Wrap]) -> None:
        """Have the parts of every step recorded, and what threads do beside it; local, before ``run``.

        Args:
            beside: Gives what records a thread, by its name.
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
        """Ask all workers to end soon; local, and enough on one rank."""
        self._strategy.stop()

    def pause_at(self, step: int) -> None:
        """Where workers keep no common pace: have them stand still at ``step``, for a checkpoint of just that step."""
        self._strategy.pause_at(step)

    def pause_soon(self) -> None:
        """Have workers come to where a checkpoint can be taken; the chief's."""
        self._strategy.pause_soon()

    @property
    def paused(self) -> bool:
        """In lockstep: whether this is the step that ``pause_soon`` asked for."""
        return self._strategy.paused

    def totals(self) -> Totals:
        """What all workers have done since the run began; on the chief, local."""
        began = time.perf_counter()
        found = self._strategy.totals()
        self.training_s += time.perf_counter() - began  # of steps that a GPU was still at
        return found

    def report(self, step: int, values: dict[str, float]) -> None:
        """Print and record values measured at ``step``; local, and only the chief's counts."""
        if self.files.console is not None and self.files.metrics is not None:
            self.files.console.measured(step, values)
            self.files.metrics.write(step, time.perf_counter() - self._began, values)

    def report_record(self, record: Mapping[str, Any]) -> None:
        """Add a line to the metrics; local, and only the chief's counts."""
        if self.files.metrics is not None:
            self.files.metrics.write(self.step, time.perf_counter() - self._began, record)

    def say(self, line: str) -> None:
        """Print a line; local, and only the chief's counts."""
        if self.files.console is not None:
            self.files.console.say(line)

    def validate_now(self) -> None:
        """Validate with the present parameters, with the moving averages if there are any.

        In lockstep by all workers together; else by the chief alone, beside its training, and left out where the last
        validation has not ended yet.
        """
        if self.lockstep:
            self._report_validation(self.step, self.validate())
        elif self._background_evaluator is not None and not self._background_evaluator.busy:
            self.report_validation()
            step = self.step
            self._background_evaluator.start(self._strategy.gather(self._validated), step)

    def report_validation(self) -> None:
        """Report what validation beside training has found by now; local."""
        found = None if self._background_evaluator is None else self._background_evaluator.found()
        if found is not None:
            self._report_validation(found.step, found.values)

    def validate_at_end(self) -> None:
        """Validate by all workers together, when they have ended; collective."""
        found = None if self._background_evaluator is None else self._background_evaluator.wait()
        if found is not None:
            self._report_validation(found.step, found.values)
        if self.cluster.workers.bcast(self._validated_at != self.step, root=0):  # as the chief knows it
            self._report_validation(self.step, self.validate())

    def validate(self) -> dict[str, float]:
        """Mean loss and accuracy on the validation examples, each worker taking its part; collective."""
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
        """Give memory back; nothing else may be called after that. Collective over all ranks."""
        self._model.close()
        self._train.close()
        if self._validation is not None:
            self._validation.close()
        self._strategy.free()
        self._data.free()

    def _compute(self, work: WorkItem) -> None:
        """One gradient of this worker, handed in."""
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
                    loss = loss + part  # a copy: what a device has returned is there until the next part
            last = index == len(self._micro_batches) - 1
            if last:
                self._begin(loss)
            self._backward()
            self._watching = False
            if not last:
                self._accumulate()
        self._backward_reached(0)
        # A guess where workers keep no common pace, and good enough to have the right part of a file read.
        self._train.expect(work.position + self.step_examples, self._micro_batches[0][1])
        self._strategy.finish()

    def _begin(self, loss: Any) -> None:
        """Have the strategy know the loss: at once, or if that means to wait, when its gradient is computed, too."""
        self._complete_from = self.layout.size
        self._watching = True
        self._announced = None
        if self._strategy.on_device or isinstance(loss, float):
            self._strategy.begin(loss)
        else:
            self._announced = loss

    def _bind(self) -> None:
        """Have the model compute with the strategy's parameters."""
        self._model.bind(self._strategy.params, self._strategy.grads)

    def _accumulate(self) -> None:
        """Keep the sum of what the parts of a batch have given, but for the last."""
        with self._model.activate():
            if self._accumulated is None:
                self._accumulated = self._strategy.grads.copy()
            elif self._keeps:
                self._accumulated += self._strategy.grads
            else:
                self._accumulated[...] = self._strategy.grads
        self._keeps = True

    def _watch_backward(self) -> None:
        """Have the model tell when a layer's gradient is done, so that it can be averaged meanwhile."""
        self._watching = False
        layer_starts = self.plan.layer_starts
        borders = {bucket.lo for bucket in self.plan.buckets if bucket.lo > 0}
        latest = {start: child for child, start in enumerate(layer_starts) if start in borders}

        def told(child: int) -> None:
            if self._watching:
                self._backward_reached(layer_starts[child])

        self._model.watch(told, {child: start for start, child in latest.items()})

    def _backward_reached(self, start: int) -> None:
        """``grads[start:]`` is what backward will give."""
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
        """Which vector is validated."""
        return "average" if self._strategy.has_average else "params"

    @property
    def _most(self) -> int:
        """Examples that validation takes at a time: no more than training does."""
        return max(stop - start for start, stop in self._micro_batches)

    def _report_validation(self, step: int, values: dict[str, float]) -> None:
        self._validated_at = step
        if values:
            self.validation = values
            self.report(step, values)

    def _loader(self, split: Any, dtype: Any, memory: Any = None) -> Loader:
        """Batches of a split; as they are stored where ``dtype`` is None."""
        return Loader(split, self._data.load(split), self.plan.config.seed, dtype, memory)

    def _make_background_evaluator(self) -> validation.BackgroundEvaluator | None:
        needed = self.cluster.chief and not self.lockstep and self.plan.config.validate_steps > 0
        if not needed or self._validation is None:
            return None
        return validation.BackgroundEvaluator(self.plan, self.job, self._validation, self._most)


def _summing(workers: MPI.Intracomm) -> Any:
    """A sum over the workers whose order does not depend on the MPI library."""

    def sum_over_workers(array: Array) -> None:
        everyone = np.empty((workers.size, *array.shape), array.dtype)
        workers.Allgather(np.ascontiguousarray(array), everyone)
        np.sum(everyone, axis=0, out=array)

    return sum_over_workers
