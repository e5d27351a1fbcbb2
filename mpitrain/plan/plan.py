"""The plan of a run, and of each worker's share of a step, from job and options: the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..core.layout import Array, Layout
from ..core.ranges import Bucket, buckets_of, split_batch
from ..core.sum_tree import additions, share, subtrees
from ..core.words import counted
from ..errors import ConfigError, DataError, JobError
from ..optim import Optimizer, Updater, momentum, moving_average
from ..optim.schedule import EpochCounter
from ..optim.whole_tensors import WholeTensorOptimizer
from .config import RunConfig
from .job import Job
from .metric import MEASURED
from .placement import Placement, assign_servers
from .progress import RunLength, Share


class Momentum(NamedTuple):
    """Momentum of gradients: ``velocity = factor * velocity + grads``, and ``nesterov`` as in ``optim.momentum``."""

    factor: float
    nesterov: bool


@dataclass(frozen=True)
class Plan:
    """How a job is trained on a number of workers.

    Attributes:
        config: The run's options; options that the job sets are no longer None.
        layout: Layout of the flat vectors.
        optimizer: The optimizer, its schedules bound to ``length.epochs``.
        moving_average: Moving average of the parameters, or None.
        layer_starts: First element of each layer of the model; gradients become ready at these boundaries.
        placements: The server of each range of the vector.
        workers: Number of ranks that compute gradients.
        validate_steps: Steps between two validations; 0 for none before the end.
        worker_momentum: Momentum that workers apply before gradients are sent, in place of the optimizer; None if they
            do not.
        length: The length of the run, an object of its own, because it depends on where training begins.
        shows_grads: Whether a script sees the gradients, and may change them before the update.
    """

    config: RunConfig
    layout: Layout
    optimizer: Optimizer
    moving_average: moving_average | None
    layer_starts: Sequence[int]
    placements: Sequence[Placement]
    workers: int
    length: RunLength
    validate_steps: int = 0
    worker_momentum: Momentum | None = None
    shows_grads: bool = False

    @property
    def train_steps(self) -> int:
        """Number of training steps; see ``RunLength.train_steps``."""
        return self.length.train_steps

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of the flat vectors."""
        return np.dtype(self.config.training.dtype)

    @cached_property
    def batch(self) -> int:
        """Examples per worker and gradient."""
        assert self.config.training.batch_size is not None
        return self.config.training.batch_size

    @cached_property
    def gradients_per_step(self) -> int:
        """Gradients that one update uses."""
        return self.config.gradients_per_step(self.workers)

    @cached_property
    def step_examples(self) -> int:
        """Examples per update; the loss is a mean over them."""
        return self.batch * self.gradients_per_step

    def workers_of(self, rank: int) -> range:
        """Return the workers, virtual ones if there are any, whose gradients a rank computes."""
        leaves = self.config.virtual_workers
        return range(rank, rank + 1) if leaves is None else range(*share(leaves, rank, self.workers))

    def share_of(self, worker: int) -> Share:
        """Return a worker's share of each step. The only place that divides the examples of a step among workers.

        The shares may differ, as every example has the same ``weight`` and gradients are sums. In modes with servers,
        each gradient is a share of its own, which begins at a position that the coordinator assigns.
        """
        parts = [stop - start for start, stop in split_batch(self.batch, self.config.training.accumulate_steps)]
        of_batch = [0, *[1] * (len(parts) - 1)]  # micro-batches of one batch are added in their order
        if (leaves := self.config.virtual_workers) is None:
            return Share(worker * self.batch, 1, tuple(parts), (tuple(of_batch),))
        own = self.workers_of(worker)
        if self.config.mode.averages_params:  # every gradient updates parameters of its own
            return Share(own[0] * self.batch, len(own), tuple(parts), (tuple(of_batch),))
        sums = (
            [n for more in additions(tree) for n in (*of_batch[:-1], of_batch[-1] + more)]
            for tree in subtrees((0, leaves), own)
        )
        return Share(own[0] * self.batch, len(own), tuple(parts), tuple(map(tuple, sums)))

    @property
    def vectors(self) -> list[str]:
        """Names of the vectors that training changes, which are ``params``, the slots, and ``average`` if it exists."""
        return ["params", *self.optimizer.slots, *(["average"] if self.moving_average is not None else [])]

    def next_pause(self, step: int) -> int:
        """Return the first step after ``step`` at which workers pause to validate or save in modes with servers."""
        periods = [every for every in (self.validate_steps, self.config.saving.save_steps) if every]
        return min([self.train_steps, *((step // every + 1) * every for every in periods)])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one vector."""
        return self.layout.size * self.dtype.itemsize

    @property
    def n_servers(self) -> int:
        """Number of servers; 1 if the parameters are in the node's shared memory."""
        return max(1, self.config.servers.ps)

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets in which gradients are averaged, last first."""
        return buckets_of(self.layer_starts, self.layout.size, self.config.parallel.bucket_bytes // self.dtype.itemsize)

    @property
    def layer_borders(self) -> dict[int, int]:
        """The first element of each bucket that does not begin at 0, by the layer whose backward pass completes it."""
        latest = {start: layer for layer, start in enumerate(self.layer_starts)}
        return {latest[bucket.lo]: bucket.lo for bucket in self.buckets if bucket.lo > 0}

    @property
    def weight(self) -> float:
        """Weight of one example's loss in a gradient."""
        return 1.0 / (self.batch if self.config.mode.averages_params else self.step_examples)

    def updater(self, vectors: Mapping[str, Array], frozen: Array | None = None) -> Updater:
        """Return an ``Updater`` that applies the optimizer to these vectors, shape (layout.size,).

        Args:
            frozen: Usually ``TrainingState.frozen``; see ``Updater``.
        """
        slots, average = {name: vectors[name] for name in self.optimizer.slots}, vectors.get("average")
        return Updater(self.optimizer, self.layout, vectors["params"], slots, average, self.moving_average, frozen)


def make_plan(job: Job, config: RunConfig, workers: int) -> Plan:
    """Lay out the model's parameters, and check that job and options are compatible.

    Raises:
        JobError, DataError, ConfigError: The job and the options are not compatible.
    """
    training = config.training
    assert training.batch_size is not None
    gradients_per_step = config.gradients_per_step(workers)
    dtype = np.dtype(training.dtype)
    _check_batch(training.batch_size * gradients_per_step, gradients_per_step, job, config.virtual_workers)
    if not config.mode.uses_servers:  # in other modes, workers take batches in no fixed order
        job.train_split.check_step(training.batch_size * gradients_per_step)
    _check_devices(config)
    check_virtual_workers(job, config)
    _check_validation(job, config)
    _check_goal(job, config)
    if training.exact_mean and not job.network.counts_labels:
        loss = "computed by the script" if job.network.has_own_loop else job.network.facts()["loss"]
        raise ConfigError(
            f"--exact-mean needs a loss of torch with reduction='mean', such as nn.CrossEntropyLoss(), but the loss is "
            f"{loss}; remove --exact-mean, or change the loss"
        )
    layout = job.network.lay_out(job.train_split, dtype)
    if job.validation_split is not None:
        job.network.check_validation(job.validation_split, dtype)
    if layout.n_params == 0:
        raise JobError("the model has no parameters; add a layer such as nn.Dense")
    job.rule.check()
    job.rule.check_names([entry.name for entry in layout.entries if entry.kind == "param"])
    _check_mode(job, config, workers)
    _check_grad_norm(job, config)
    rule, worker_momentum = _divide_momentum(job.rule, config)
    epochs = EpochCounter(len(job.train_split), training.batch_size * gradients_per_step)
    return Plan(
        config=config,
        layout=layout,
        optimizer=rule.for_epochs(epochs),
        moving_average=job.moving_average,
        layer_starts=tuple(job.network.starts(layout)),
        placements=tuple(
            assign_servers(layout, max(1, config.servers.ps), config.servers.placement, dtype.itemsize, job.pins)
        ),
        workers=workers,
        validate_steps=0 if job.validation_split is None else training.validate_steps,
        worker_momentum=worker_momentum,
        shows_grads=job.network.has_own_loop,
        length=RunLength(epochs, training.train_steps, training.train_epochs, not config.mode.drops_late_gradients),
    )


def _check_grad_norm(job: Job, config: RunConfig) -> None:
    """Reject ``--log-grad-norm`` if the optimizer measures the norm of its steps' direction, not of the gradient."""
    trust = job.rule.trust_ratio
    if config.output.log_grad_norm and trust is not None and trust.after_rule:
        raise ConfigError(f"--log-grad-norm does not work with the optimizer {job.rule.name}; remove the flag")


def _divide_momentum(rule: Optimizer, config: RunConfig) -> tuple[Optimizer, Momentum | None]:
    """Return the optimizer of the servers, and the momentum that workers apply if they send few elements at a time.

    Raises:
        ConfigError: The optimizer applies ``l2`` before momentum, or its groups have different momentum.
    """
    compression = config.compression
    sends_few = compression is not None and compression.fraction > 0 and config.mode.is_asynchronous
    if not sends_few or not isinstance(rule, momentum):
        return rule, None
    differs = any(options.keys() & {"momentum", "nesterov", "l2"} for options in rule.groups.values())
    if rule.l2 or differs:
        raise ConfigError(
            f"with --compress {compression} workers apply the momentum, which does not support l2, or "
            f"groups with different momentum; use weight_decay, or another --compress"
        )
    options = {option.name: getattr(rule, option.name) for option in fields(momentum)}
    return momentum(**options | {"momentum": 0.0, "nesterov": False}), Momentum(rule.momentum, rule.nesterov)


def _check_batch(step_examples: int, gradients_per_step: int, job: Job, virtual: int | None) -> None:
    if step_examples > len(job.train_split):
        batch = len(job.train_split) // gradients_per_step
        fixes = [f"set --batch-size {batch} or less"] if batch else []
        if gradients_per_step > 1:
            fixes.append("use fewer workers" if virtual is None else "use fewer --virtual-workers")
        size = f"{step_examples // gradients_per_step:,} examples"
        batches = f"a batch of {size}" if gradients_per_step == 1 else f"{gradients_per_step} batches of {size}"
        raise DataError(
            f"a step uses {batches}, but there are {len(job.train_split):,} training examples"
            + ("; " + " or ".join(fixes) if fixes else "")
        )


def _check_validation(job: Job, config: RunConfig) -> None:
    if config.training.validate_secs and job.validation_split is None:
        raise ConfigError(
            f"--validate-secs {config.training.validate_secs:g} requires validation examples, but the "
            f"job has none; add Job(validation=...), or remove --validate-secs"
        )
    if job.metrics and job.validation_split is None:
        raise JobError("Job(metrics=...) requires validation examples; add Job(validation=...)")


def _check_goal(job: Job, config: RunConfig) -> None:
    """Check that validation measures ``--stop-metric``; the metrics of a user's own loop are not known yet."""
    goal, option = config.training.goal, f"--stop-metric {config.training.stop_metric}"
    if goal is None or job.network.has_own_loop:
        return
    if job.validation_split is None:
        raise ConfigError(
            f"{option} requires validation examples, but the job has none; add Job(validation=...), or remove {option}"
        )
    names = [*MEASURED, *job.metrics]
    if goal.name not in names and not any(goal.name.startswith(f"{name}_") for name in job.metrics):
        raise ConfigError(f"{option} is not a metric of the job: must be one of {', '.join(names)}")


def _check_devices(config: RunConfig) -> None:
    """Check that every micro-batch has an example for every device of a rank."""
    batch, parts, devices = config.training.batch_size, config.training.accumulate_steps, config.device.devices_per_rank
    assert batch is not None
    if parts > batch:
        raise ConfigError(
            f"--accumulate-steps {parts} exceeds a worker's batch of {batch} examples: must be <= {batch}"
        )
    least = min(stop - start for start, stop in split_batch(batch, parts))
    if devices > least:
        examples = counted(least, "example")
        source = "batch" if parts == 1 else "micro-batch (--accumulate-steps)"
        raise ConfigError(
            f"--devices-per-rank {devices} exceeds the {examples} of a worker's {source}; "
            "increase --batch-size or use fewer devices"
        )


def check_virtual_workers(job: Job, config: RunConfig) -> None:
    """Reject jobs whose result depends on the number of workers.

    Raises:
        ConfigError: The run has virtual workers, and cannot have any.
    """
    trust, trains_apart = job.rule.trust_ratio, config.mode.averages_params
    for what, is_used in (
        ("BatchNorm statistics of all workers, because their sums depend on it", job.network.synchronizes_statistics),
        (f"{job.train_split.source}, of which every process reads a share", job.train_split.is_stream),
        (
            f"the optimizer {job.rule.name}, because it updates its slots in parts",
            trust is not None and trust.after_rule,
        ),
        ("the loop of a script in --mode local", trains_apart and job.network.has_own_loop),
        (
            f"the optimizer {job.rule.name} in --mode local, because its state is not in vectors",
            trains_apart and isinstance(job.rule, WholeTensorOptimizer),
        ),
    ):
        if config.virtual_workers is not None and is_used:
            raise ConfigError(
                f"--virtual-workers {config.virtual_workers} gives the same result on any number of workers; it does "
                f"not work with {what}: remove --virtual-workers, or change the job"
            )


def _check_mode(job: Job, config: RunConfig, workers: int) -> None:
    """Reject requests of the job that the mode does not support."""
    optimizer = job.rule
    if isinstance(optimizer, WholeTensorOptimizer):
        for option, is_given in (
            (f"--mode {config.parallel.mode}", config.uses_servers),
            ("--elastic-rho", config.parallel.elastic_rho is not None),
            ("--outer-optimizer", config.parallel.outer_optimizer is not None),
            ("--compress-after", config.parallel.compress_after > 0),
            ("--devices-per-rank", config.device.devices_per_rank > 1),
        ):
            if is_given:
                raise ConfigError(
                    f"{optimizer.name} updates whole tensors, which does not work with {option}: use --mode sync or "
                    "local, without --elastic-rho, --outer-optimizer and --compress-after, on one CPU device for each "
                    "rank; or another optimizer"
                )
    if not config.uses_servers:
        return
    if workers > 1 and job.network.synchronizes_statistics:
        raise ConfigError(
            f"the model uses BatchNorm statistics of all workers, but in --mode {config.parallel.mode} workers are not "
            "synchronized; use BatchNorm(sync=False), or for PyTorch modules nn.BatchNorm1d, 2d or 3d, or --mode sync"
        )
    if not optimizer.layerwise or config.servers.ps < 2 or not config.mode.is_asynchronous:
        return
    if config.servers.placement == "partitioned":
        raise ConfigError(
            f"{optimizer.name} needs whole variables on one server, but --placement partitioned splits them; "
            "use --placement greedy or round_robin"
        )
    if optimizer.clip_norm is not None:
        raise ConfigError(
            f"{optimizer.name} with clip_norm needs the whole gradient on one server: "
            f"--ps is {config.servers.ps}; use --ps 1 or remove clip_norm"
        )
