"""Messages of the chief about a run: its size, its data, and its result."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ..comm.cluster import Cluster
from ..comm.mpi import library_name
from ..core.device import Device
from ..core.words import counted
from ..data import Split
from ..data.steps import Steps
from ..monitor.console import describe
from ..monitor.heartbeat import RunEnd
from ..plan.config import RunConfig
from ..plan.job import Job
from ..plan.plan import Plan
from ..process.run_directory import SCALE_REQUEST
from .loop import Loop

_SHORT_S = 0.05  # shorter compilations are not reported


def headline(cluster: Cluster, name: str, config: RunConfig, threads: int, devices: Sequence[Device]) -> str:
    workers, servers = len(cluster.worker_ranks), len(cluster.servers)
    serving = f" and {counted(servers, 'server')}" if servers else ""
    nodes = counted(cluster.n_nodes, "node")
    return (
        f"{name}: {counted(workers, 'worker')}{serving} on {nodes}, "
        f"{config.parallel.mode}, {config.training.dtype}, {counted(threads, 'thread')} each, "
        f"{library_name()}"
        + ("; on GPUs" if devices[0].is_gpu else "")
        + (f" in {config.device.precision}" if devices[0].is_gpu and config.device.precision != "float32" else "")
    )


def notes_on_data(job: Job) -> list[str]:
    """Return the notes on how data is read, once per file."""
    return list(dict.fromkeys(split.note for split in job.splits.values() if split.note is not None))


def notes_on_patience(job: Job, plan: Plan) -> list[str]:
    """Return a note if the run has too few validations for ``--patience`` to end it before the last step."""
    training, every = plan.config.training, plan.validate_steps
    if training.patience is None or not every or training.validate_secs or job.network.has_own_loop:
        return []
    validations = (plan.train_steps - 1) // every  # before the last step; the first one is the best so far
    if validations > training.patience:
        return []
    needed = (plan.train_steps - 1) // (training.patience + 1)
    advice = f"pass --validate-steps {needed} or less" if needed else "train for more steps"
    return [
        f"--patience {training.patience} has no effect: it needs {training.patience + 1} validations before the last "
        f"step, and --validate-steps {every} gives {validations}; {advice}"
    ]


def describe_job(loop: Loop, split: Split, resumed: str | None) -> str:
    plan = loop.plan
    has_spare_workers = not plan.config.mode.is_asynchronous and plan.gradients_per_step < plan.workers
    of = f" of {plan.workers}" if has_spare_workers else ""
    data = f"{len(split):,} training examples, {plan.gradients_per_step}{of} x {plan.batch} examples per step"
    if isinstance(split, Steps):
        data = f"{split.steps:,} steps without a dataset, {plan.gradients_per_step}{of} gradients per step"
    epochs: float | None = plan.config.training.train_epochs
    if epochs is not None:
        if plan.config.run.join is not None:  # the run's first learner has set the length
            epochs = round(loop.train_steps * plan.step_examples / len(split), 1)
        data += f", {epochs:,g} epoch{'s' * (epochs != 1)} until step {loop.train_steps:,}"
    return f"{plan.layout.n_params:,} parameters, {data}" + (
        f"; resumed from {resumed} at step {loop.step:,}" if resumed else ""
    )


def summary(loop: Loop, split: Split, folder: Path, steps: int, seconds: float, compiling_s: float, end: RunEnd) -> str:
    lines = []
    if not steps:
        lines.append(f"nothing to train: already at step {loop.step:,} of {loop.train_steps:,}")
    else:
        per_step, unit = (1, "steps") if isinstance(split, Steps) else (loop.plan.step_examples, "examples")
        rate = steps * per_step / (seconds - compiling_s)
        duration = f"{counted(steps, 'step')} in {seconds:.1f} s"
        if compiling_s > _SHORT_S:
            duration += f", {compiling_s:.1f} s of them for compiling kernels"
        lines.append(f"{duration}: {rate:,.0f} {unit}/s, including validation and saving")
    measured = "  ".join(describe(name, value) for name, value in loop.validation.items())
    if measured:
        lines.append(f"at step {loop.measured_step:,}: {measured}")
    if end.state == "finished early":
        lines.append(f"finished early at step {loop.step:,} of {loop.train_steps:,}: {end.reason}")
    if end.state == "stopped":
        is_scaled = (folder / SCALE_REQUEST).exists()
        resuming = f"; to resume, run the same command with --run-dir {shlex.quote(str(folder))}"
        lines.append(f"stopped early at step {loop.step:,} of {loop.train_steps:,}{'' if is_scaled else resuming}")
    else:
        lines.append(f"run directory: {folder}")
    return "\n".join(lines)
