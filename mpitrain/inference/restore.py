"""Rebuild the job of a run from its record, and its model from a checkpoint."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import checkpoint
from ..core.device import CPU
from ..core.extra_state import ExtraState
from ..core.layout import Array, Layout
from ..core.training_state import TrainingState
from ..errors import CheckpointError, ConfigError, RecordError
from ..models.base import Model
from ..models.select import make_model
from ..monitor.run_record import RecordedJob, recorded_job
from ..plan.config import GROUPS, RunConfig
from ..plan.job import Job, load_job_file, make_job
from ..plan.option import names_of
from ..plan.options import job_options, run_config
from ..plan.plan import make_plan
from ..plan.script import is_script

_PASS_IT = "as in mpitrain.load(path, model=my_model); the commands predict and evaluate need a job file"
_USED = names_of(GROUPS, lambda info: info.is_part_of_model)  # all others get their defaults


@dataclass(frozen=True)
class Trained:
    """A job with the values of a checkpoint.

    Attributes:
        job: The job, whose model still has its initial values.
        path: The checkpoint.
        step: The number of completed steps.
        layout: The layout of ``params``.
        params: Shape (layout.size,): the parameters, or their moving averages.
        extra_state: The model's buffers that are not in ``params``.
        config: The options that the model depends on.
    """

    job: Job
    path: Path
    step: int
    layout: Layout
    params: Array
    extra_state: ExtraState
    config: RunConfig

    def model(self) -> Model:
        """Return the model with these values, on the CPU."""
        plan = make_plan(self.job, self.config, 1)
        model = make_model(self.job, plan, [CPU], TrainingState(plan.layout, self.job.network.frozen))
        model.bind(self.params, np.zeros_like(self.params))
        model.load_extra_state(self.extra_state)
        return model


def restore(path: Path, job: Job | None = None, averages: bool | None = False) -> Trained:
    """Read a checkpoint and make its job.

    The code that makes the job runs in this process. It is the job file that the run read, or the copy in the run's
    record if that file has changed.

    Args:
        path: A checkpoint, or a run directory (its newest checkpoint is used).
        job: Used in place of the record.
        averages: Whether to use the moving averages of the parameters; None: if there are any.

    Raises:
        CheckpointError: The checkpoint does not exist, is damaged, or does not match the job. Or ``job`` is None, and
            the run directory has no record of a job file.
        JobError, DataError: The job cannot be made.
    """
    with checkpoint.Checkpoint(checkpoint.find(path)[0]) as opened:
        if job is None:
            record = _record(opened)
            config = _config(record)
            job = _job(opened, record, config)
        else:
            config = RunConfig()
            with contextlib.suppress(CheckpointError):
                config = _config(_record(opened))
        config = job.completed(config)
        layout = job.network.lay_out(job.train_split, np.dtype(config.training.dtype))
        if averages is None:
            averages = "averages" in opened.attributes
        params, extra_state = checkpoint.read_model(opened, layout, averages)
        return Trained(job, opened.path, opened.step, layout, params, extra_state, config)


def _record(opened: checkpoint.Checkpoint) -> RecordedJob:
    """Return the record of the run that wrote a checkpoint."""
    try:
        return recorded_job(opened.path.absolute().parent.parent, opened.step)
    except RecordError as error:
        raise CheckpointError(f"{opened.path}: {error}, {_PASS_IT}") from error


def _config(record: RecordedJob) -> RunConfig:
    """Return the options of a run on which its model depends."""
    # Versions of mpitrain that did not record this option did not flush denormals.
    recorded = {"flush_denormals": False, **record.tables.get("run", {})}
    config = run_config({name: recorded[name] for name in _USED if name in recorded})
    return _with_bfloat16(config) if recorded.get("precision") == "bfloat16" else config


def _job(opened: checkpoint.Checkpoint, record: RecordedJob, config: RunConfig) -> Job:
    """Return the job that wrote a checkpoint, made by its recorded job file."""
    if is_script(record.path):
        raise CheckpointError(
            f"{opened.path} was trained by a script, {record.path.name}, not by a job file: pass the model, {_PASS_IT}"
        )
    with _importable(record):
        function = load_job_file(record.path)
        table = record.tables.get("job", {})
        arguments = {
            str(option.name): option.type(table[str(option.name)]) if str(option.name) in table else None
            for option in job_options(record.path, function)
        }
        return make_job(record.path, function, arguments, config.training.seed)


def _with_bfloat16(config: RunConfig) -> RunConfig:
    """Return the options with bfloat16 as precision: PyTorch modules compute in it on CPUs, too."""
    with contextlib.suppress(ConfigError):
        return RunConfig.of(**config.options() | {"precision": "bfloat16"})
    return config


@contextlib.contextmanager
def _importable(record: RecordedJob) -> Iterator[None]:
    """Let the job file import modules that are in its folder, and then restore the import path."""
    before: list[Any] = sys.path[:]
    sys.path.insert(0, str(record.folder))
    try:
        yield
    finally:
        sys.path[:] = before
