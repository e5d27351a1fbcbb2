"""The training loop: what every worker does, whatever the mode."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from . import checkpoint
from .cluster import Cluster
from .comm.dataset import SharedData
from .comm.hierarchy import hierarchy_of
from .config import RunConfig
from .data import Loader
from .errors import DataError, JobError
from .hooks import Hook, Log, Save, Validate
from .job import Job
from .monitor.console import Console
from .monitor.metrics import MetricsFile
from .mpi import MPI
from .nn.container import Sequential
from .nn.layer import Context, Layer, bind, initialize, layout_of, walk
from .optim import Updater
from .params import Array, Layout
from .strategy.base import STOP, Strategy
from .strategy.sync import Sync


@dataclass
class RunFiles:
    """Where the chief writes.

    Attributes:
        folder: The run directory.
        console: None on other ranks, like ``metrics``.
    """

    folder: Path
    console: Console | None
    metrics: MetricsFile | None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


class Loop:
    """Trains a job; what hooks see of it.

    Construction and every method are collective over the workers, but for ``report`` and ``stop``.

    Attributes:
        cluster, job, config: What was given.
        step: Steps done.
        position: Examples taken by all workers together from the endless stream of examples.
        training_s: Seconds spent in training steps, without validation and saving.
        loss: The last step's mean loss over the global batch.
        skipped: Whether the last step's update was left out, since the loss was not finite.
        batch, global_batch: Examples of a step, of this worker and of all.
        validation: What was last measured on the validation examples.
        resumed: The checkpoint that this run goes on from, or None.
    """

    def __init__(self, cluster: Cluster, job: Job, config: RunConfig, files: RunFiles, resume: Path | None) -> None:
        self.cluster, self.job, self.config, self.files, self.resumed = cluster, job, config, files, resume
        assert config.batch_size is not None and config.train_steps is not None
        workers = cluster.workers
        self.batch, self.train_steps = config.batch_size, config.train_steps
        self.global_batch = self.batch * workers.size
        self.step = self.position = 0
        self.training_s = 0.0
        self.loss, self.skipped = float("nan"), False
        self.validation: dict[str, float] = {}
        self._flags = 0
        self._optimizer = job.optimizer.for_epochs(len(job.train) / self.global_batch)
        self.dtype = np.dtype(config.dtype)
        with cluster.agree("building the model"):
            _check_batch(self.global_batch, workers.size, job)
            self.layout = layout_of(job.model, job.train.shape, self.dtype)
            if self.layout.n_params == 0:
                raise JobError("the model has no parameters: give it a layer that has, such as nn.Dense")
            job.loss.check(job.model.output_shape, job.train.classes)
        cluster.check_layout(self.layout)
        self._data = SharedData(cluster, config.shared_memory)
        self._train = self._loader(job.train)
        self._validation = None if job.validation is None else self._loader(job.validation)
        self._strategy = self._make_strategy()
        self._context = Context(
            training=True,
            seed=config.seed,
            weight=1.0 / self.global_batch,
            sum_over_workers=_summing(workers) if workers.size > 1 else None,
        )
        self._micro_batches = _split(self.batch, config.accumulate_steps)
        self._accumulated = np.zeros(self.layout.size if len(self._micro_batches) > 1 else 0, self.dtype)
        self._start_values(resume)
        bind(job.model, self.layout, self._strategy.params, self._strategy.grads)
        self._watch_backward()
        self._hooks: list[Hook] = [
            Log(config.log_steps),
            Validate(config.validate_steps),
            Save(config.save_steps),
        ]
        self._hooks += job.hooks

    @property
    def learning_rate(self) -> float:
        """Of the last step."""
        return self._optimizer.rate(max(self.step - 1, 0))

    def run(self) -> None:
        """Train until ``train_steps``, or until a hook says stop.

        Raises:
            NonFiniteLoss: On every worker, where the loss is not finite and the run is to stop then.
        """
        self._began = time.perf_counter()
        if self.files.console is not None:
            self.files.console.start(self.step, self.train_steps)
        # What overflows shows in the loss, for which there is a policy.
        with np.errstate(all="ignore"):
            self._run()
        if self.files.console is not None:
            self.files.console.stop()

    def _run(self) -> None:
        for hook in self._hooks:
            hook.begin(self)
        stopping = 0
        while self.step < self.train_steps and not stopping:
            began = time.perf_counter()
            stopping = self._take_step() & STOP
            self.training_s += time.perf_counter() - began
            for hook in self._hooks:
                hook.after_step(self)
            if self.files.console is not None:
                self.files.console.advance(self.step)
        for hook in self._hooks:
            hook.end(self)

    def stop(self) -> None:
        """Ask all workers to end after the next step; local, and enough on one rank."""
        self._flags |= STOP

    def report(self, **measured: float) -> None:
        """Print and record values measured at this step; local, and only the chief's counts."""
        if self.files.console is not None and self.files.metrics is not None:
            self.files.console.measured(self.step, measured)
            self.files.metrics.write(self.step, time.perf_counter() - self._began, measured)

    def validate(self) -> dict[str, float]:
        """Mean loss and accuracy on the validation examples, measured with the moving averages if there are any."""
        if self._validation is None:
            return {}
        workers, count = self.cluster.workers, len(self._validation)
        start, stop = (count * (workers.rank + i) // workers.size for i in (0, 1))
        average = self._strategy.average
        if average is not None:
            bind(self.job.model, self.layout, self._strategy.complete("average"), self._strategy.grads)
        sums = np.zeros(3)  # of losses, of right answers, of batches that know right from wrong
        most = max(b - a for a, b in self._micro_batches)  # no more than training takes at a time
        for lo in range(start, stop, most):
            examples, labels = self._validation.sequential(lo, min(lo + most, stop))
            outputs = self.job.model.forward(examples, Context())
            loss, correct = self.job.loss.evaluate(outputs, labels)
            sums += loss, correct or 0, correct is not None
        if average is not None:
            bind(self.job.model, self.layout, self._strategy.params, self._strategy.grads)
        everyone = np.empty((workers.size, 3))
        workers.Allgather(sums, everyone)
        total = everyone.sum(axis=0)
        measured = {"validation_loss": float(total[0]) / count}
        if total[2]:
            measured["validation_accuracy"] = float(total[1]) / count
        self.validation = measured
        return measured

    def save(self) -> Path:
        """Write a checkpoint of this step; returns its path."""
        vectors = {name: self._strategy.complete(name) for name in self._strategy.vectors}
        path = checkpoint.path_for(self.files.checkpoints, self.step)
        with self.cluster.agree("saving a checkpoint"):
            if self.cluster.chief:
                about = {"mode": self.config.mode, "workers": self.cluster.workers.size}
                checkpoint.write(path, self.layout, vectors, self.step, self.position, self.config.seed, about)
        return path

    def free(self) -> None:
        """Give shared memory back; nothing else may be called after that."""
        self._train.close()
        if self._validation is not None:
            self._validation.close()
        self._strategy.free()
        self._data.free()

    def _take_step(self) -> int:
        """One step of all workers; returns the union of their flags."""
        rank = self.cluster.workers.rank
        first = self.position + rank * self.batch
        loss = 0.0
        for index, (start, stop) in enumerate(self._micro_batches):
            examples, labels = self._train.batch(first + start, stop - start)
            self._context.position = first + start
            outputs = self.job.model.forward(examples, self._context)
            part, gradient = self.job.loss(outputs, labels, self._context.weight)
            loss += part
            last = index == len(self._micro_batches) - 1
            if last:
                self._strategy.begin(self.step, loss, self._flags)
                self._adding, self._complete_from = index > 0, self.layout.size
                self._watching = True
            self.job.model.backward(gradient)
            self._watching = False
            if not last:
                self._accumulate(first_part=index == 0)
        self._backward_reached(0)
        self._train.expect(first + self.global_batch, self._micro_batches[0][1])
        result = self._strategy.finish()
        self.loss, self.skipped = result.loss, not result.updated
        self.step += 1
        self.position += self.global_batch
        return result.flags

    def _accumulate(self, first_part: bool) -> None:
        if first_part:
            np.copyto(self._accumulated, self._strategy.grads)
        else:
            self._accumulated += self._strategy.grads

    def _watch_backward(self) -> None:
        """Have the model tell when a layer's gradient is done, so that it can be averaged meanwhile."""
        self._watching = False
        model = self.job.model
        if isinstance(model, Sequential):
            starts = _starts(model, self.layout)
            model.after_backward = lambda child: self._backward_reached(starts[child]) if self._watching else None

    def _backward_reached(self, start: int) -> None:
        """``grads[start:]`` is what backward will give."""
        if start >= self._complete_from:
            return
        if self._adding:
            self._strategy.grads[start : self._complete_from] += self._accumulated[start : self._complete_from]
        self._complete_from = start
        self._strategy.ready(start)

    def _loader(self, split: Any) -> Loader:
        return Loader(split, self._data.load(split), self.config.seed, self.dtype)

    def _make_strategy(self) -> Strategy:
        job, config = self.job, self.config
        optimizer, averages = self._optimizer, job.moving_average is not None
        vectors = self.cluster.node.size + 1 + len(optimizer.slots) + averages
        hierarchy = hierarchy_of(
            self.cluster, vectors * self.layout.size * self.dtype.itemsize, config.shared_memory, self._say
        )
        return Sync(
            hierarchy,
            self.layout,
            self.dtype,
            _starts(job.model, self.layout),
            optimizer.slots,
            averages,
            lambda params, slots, average: Updater(optimizer, self.layout, params, slots, average, job.moving_average),
            config.bucket_bytes,
            config.nan,
        )

    def _say(self, line: str) -> None:
        if self.files.console is not None:
            self.files.console.say(line)

    def _start_values(self, resume: Path | None) -> None:
        """Fill the strategy's vectors with initial values, or with those of a checkpoint."""
        vectors = self._strategy.vectors
        reached = (0, 0)
        with self.cluster.agree("reading a checkpoint" if resume else "initializing"):
            if self._strategy.leads:
                for vector in vectors.values():
                    vector[:] = 0
            if self._strategy.leads and resume is not None:
                reached = checkpoint.read(resume, self.layout, vectors, self.config.seed)
            elif self._strategy.leads:
                initialize(self.job.model, self.layout, vectors["params"], self.config.seed)
                if "average" in vectors:
                    vectors["average"][:] = vectors["params"]
        self.step, self.position = self.cluster.comm.bcast(reached, root=0)


def _check_batch(global_batch: int, workers: int, job: Job) -> None:
    if global_batch > len(job.train):
        each = len(job.train) // workers
        raise DataError(
            f"a batch of {global_batch:,} examples ({workers} workers, {global_batch // workers:,} each) does not fit "
            f"{len(job.train):,} training examples; give --batch-size {each} or less, or fewer workers"
        )


def _split(batch: int, parts: int) -> list[tuple[int, int]]:
    """Nearly equal ranges of [0, batch), none empty."""
    cuts = [batch * i // parts for i in range(parts + 1)]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def _starts(model: Layer, layout: Layout) -> list[int]:
    """For each child of the model, where its own parameters or else those of the children after it begin."""
    begin = {entry.name: entry.start for entry in layout.entries if entry.kind == "param"}
    start, starts = layout.n_trained, []
    for name, child in reversed(model.children()):
        for path, layer in walk(child, name):
            start = min([start, *(begin[f"{path}.{own}"] for own in layer.declared if f"{path}.{own}" in begin)])
        starts.append(start)
    return starts[::-1]


def _summing(workers: MPI.Intracomm) -> Any:
    """A sum over the workers whose order does not depend on the MPI library."""

    def sum_over_workers(array: Array) -> None:
        everyone = np.empty((workers.size, *array.shape), array.dtype)
        workers.Allgather(np.ascontiguousarray(array), everyone)
        np.sum(everyone, axis=0, out=array)

    return sum_over_workers
