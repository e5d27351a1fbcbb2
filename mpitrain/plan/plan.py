"""What a job and the options of a run come to: the same on every rank, whatever its role. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.layout import Array, Layout
from ..core.ranges import Bucket, buckets_of, split_batch
from ..errors import ConfigError, DataError, JobError
from ..nn.layer import Layer, layout_of, walk
from ..nn.normalize import BatchNorm
from ..optim import Optimizer, Updater, moving_average
from .config import Precision, RunConfig
from .job import Job
from .placement import Placement, place


@dataclass(frozen=True)
class Plan:
    """How a job is trained on so many workers.

    Attributes:
        config: The run's options, none of those that a job decides left at None.
        layout: Of the flat vectors.
        dtype: Of their elements.
        optimizer: With its schedule told how long an epoch is.
        moving: How averages of the parameters follow them; None where there are none.
        starts: First element of each layer of the model, where gradients become ready.
        pieces: Which server holds which range of the vector.
        workers: Ranks that compute gradients.
        batch: Examples of a worker for one gradient.
        taken: Gradients that one update takes.
    """

    config: RunConfig
    layout: Layout
    dtype: np.dtype[Any]
    optimizer: Optimizer
    moving_average: moving_average | None
    layer_starts: list[int]
    placements: list[Placement]
    workers: int
    batch: int
    gradients_per_step: int

    @property
    def train_steps(self) -> int:
        assert self.config.train_steps is not None
        return self.config.train_steps

    @property
    def step_examples(self) -> int:
        """Examples of one update: what the loss is a mean over."""
        return self.batch * self.gradients_per_step

    @property
    def vectors(self) -> list[str]:
        """Names of the vectors that training changes: ``params``, the slots, and ``average`` where there is one."""
        return ["params", *self.optimizer.slots, *(["average"] if self.moving_average is not None else [])]

    @property
    def nbytes(self) -> int:
        """Bytes of a vector."""
        return self.layout.size * self.dtype.itemsize

    @property
    def push_precision(self) -> Precision | None:
        """Narrower type that gradients have on their way to servers on other nodes; None where they go as they are."""
        asked = self.config.push_precision
        return None if asked == self.config.dtype else asked

    @property
    def n_servers(self) -> int:
        """Servers, or 1 where a node's memory takes their place."""
        return max(1, self.config.ps)

    @property
    def buckets(self) -> list[Bucket]:
        """Ranges that gradients are averaged in, the last first."""
        return buckets_of(self.layer_starts, self.layout.size, self.config.bucket_bytes // self.dtype.itemsize)

    @property
    def weight(self) -> float:
        """What one example's loss counts for in a gradient."""
        return 1.0 / (self.batch if self.config.mode == "local" else self.step_examples)

    def updater(self, vectors: Mapping[str, Array]) -> Updater:
        """The optimizer, bound to vectors of shape (layout.size,)."""
        slots, average = {name: vectors[name] for name in self.optimizer.slots}, vectors.get("average")
        return Updater(self.optimizer, self.layout, vectors["params"], slots, average, self.moving_average)


def make_plan(job: Job, config: RunConfig, workers: int) -> Plan:
    """Lay out the model's parameters, and check that job and options fit each other.

    Raises:
        JobError, DataError, ConfigError: They do not; the message says how to mend it.
    """
    assert config.batch_size is not None
    gradients_per_step = config.gradients_per_step(workers)
    dtype = np.dtype(config.dtype)
    _check_batch(config.batch_size * gradients_per_step, gradients_per_step, job)
    _check_devices(config)
    layout = layout_of(job.model, job.train.shape, dtype)
    if layout.n_params == 0:
        raise JobError("the model has no parameters: give it a layer that has, such as nn.Dense")
    job.loss.check(job.model.output_shape, job.train.classes)
    _check_mode(job, config, workers)
    return Plan(
        config=config,
        layout=layout,
        dtype=dtype,
        optimizer=job.optimizer.for_epochs(len(job.train) / (config.batch_size * gradients_per_step)),
        moving_average=job.moving_average,
        layer_starts=_starts(job.model, layout),
        placements=place(layout, max(1, config.ps), config.placement, dtype.itemsize, job.pins),
        workers=workers,
        batch=config.batch_size,
        gradients_per_step=gradients_per_step,
    )


def _check_batch(step_examples: int, gradients_per_step: int, job: Job) -> None:
    if step_examples > len(job.train):
        each = len(job.train) // gradients_per_step
        raise DataError(
            f"a batch of {step_examples:,} examples ({gradients_per_step} workers, {step_examples // gradients_per_step:,} each) does not fit "
            f"{len(job.train):,} training examples; give --batch-size {each} or less, or fewer workers"
        )


def _check_devices(config: RunConfig) -> None:
    """Make sure that every part of a batch has an example, and every device of a rank one of every part."""
    assert config.batch_size is not None
    if config.accumulate_steps > config.batch_size:
        raise ConfigError(
            f"--accumulate-steps {config.accumulate_steps} cuts a worker's batch of {config.batch_size} into more "
            f"parts than there are examples: give {config.batch_size} or less"
        )
    least = min(stop - start for start, stop in split_batch(config.batch_size, config.accumulate_steps))
    if config.devices_per_rank > least:
        each = f"{least} example{'s' * (least != 1)}"
        at_a_time = each if config.accumulate_steps == 1 else f"{each} at a time (--accumulate-steps)"
        raise ConfigError(
            f"--devices-per-rank {config.devices_per_rank} has no example for some device: a worker takes {at_a_time}; "
            "give a larger --batch-size or fewer devices"
        )


def _check_mode(job: Job, config: RunConfig, workers: int) -> None:
    """Refuse what a job asks for and a mode cannot do."""
    if not config.served:
        return
    optimizer = job.optimizer
    if workers > 1 and any(isinstance(layer, BatchNorm) and layer.sync for _, layer in walk(job.model)):
        raise ConfigError(
            f"the model takes BatchNorm statistics over all workers, who do not wait for each other in --mode "
            f"{config.mode}: use BatchNorm(sync=False), or --mode sync"
        )
    if not optimizer.layerwise or config.ps < 2 or config.mode == "backup":
        return
    if config.placement == "partitioned":
        raise ConfigError(
            f"{optimizer.name} needs whole variables on one server, and --placement partitioned cuts them: "
            "give --placement greedy or round_robin"
        )
    if optimizer.clip_norm is not None:
        raise ConfigError(
            f"{optimizer.name} with clip_norm needs the whole gradient on one server: "
            f"give --ps 1 in place of {config.ps}, or leave clip_norm out"
        )


def _starts(model: Layer, layout: Layout) -> list[int]:
    """For each child of the model, where its own parameters or else those of the children after it begin."""
    begin = {entry.name: entry.start for entry in layout.entries if entry.kind == "param"}
    start, layer_starts = layout.n_trained, []
    for name, child in reversed(model.children()):
        for path, layer in walk(child, name):
            start = min([start, *(begin[f"{path}.{own}"] for own in layer.declared if f"{path}.{own}" in begin)])
        layer_starts.append(start)
    return layer_starts[::-1]
