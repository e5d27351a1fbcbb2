"""Times of training steps that all ranks take at once without communication, and the spread of these times.

These times differ from the times of repeated calls of one function, because in a step, less of an update's vectors is
in the caches.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..comm.cluster import Cluster
from ..core.layout import Array
from ..monitor import trace
from ..plan.hook import Hook, TrainingLoop
from ..plan.job import Job
from ..process.rank_status import RankStatusFile
from ..training.session import training_session
from ..training.setup import TrainRequest

_FEWEST, _MOST = 20, 1000


@dataclass(frozen=True)
class StepTimes:
    """Times of this rank's steps.

    Attributes:
        compute_s: Seconds of forward and backward pass of each step, shape (steps,).
        update_s: Median seconds of an update of the whole vector by this rank's gradient.
        loop_s: Median seconds of the rest of the step, without loading.
    """

    compute_s: Array
    update_s: float
    loop_s: float


class _RecordSteps(Hook):
    """Records, after every step, the seconds that all steps so far have spent in each kind of span."""

    def __init__(self) -> None:
        self.recorder: trace.Recorder | None = None
        self.seconds: list[dict[str, float]] = []

    def after_step(self, loop: TrainingLoop) -> None:
        if self.recorder is not None:
            self.seconds.append(self.recorder.track.seconds)

    def steps(self, *kinds: str) -> Array:
        """Return the seconds of each step in spans of these kinds, without the first tenth of the steps."""
        totals = np.array([sum(seconds.get(kind, 0.0) for kind in kinds) for seconds in self.seconds])
        return np.diff(totals)[len(totals) // 10 : -1]  # without the last step, which also averages the workers


def step_times(
    cluster: Cluster, request: TrainRequest, rank_status: RankStatusFile, step_s: float, seconds: float
) -> StepTimes:
    """Train each worker alone for about this number of seconds. Collective over all ranks.

    Args:
        step_s: Approximate duration of a step.
    """
    steps = int(min(_MOST, max(_FEWEST, seconds / step_s)))
    record = _RecordSteps()

    def make() -> Job:
        job = request.make()
        return replace(job, hooks=[*job.hooks, record], validation=None, metrics={})

    options = {name: value for name, value in request.config.options().items() if value is not None}
    options |= {
        "mode": "local", "local_steps": steps, "train_steps": steps, "train_epochs": None, "validate_steps": 0,
        "validate_secs": 0, "log_steps": 0, "tensorboard": False, "resume": "never", "exact_mean": False,
    }  # fmt: skip
    config = type(request.config).of(**options)
    with _quiet(), training_session(cluster, replace(request, config=config, make=make), rank_status) as session:
        if session.loop is not None:
            record.recorder = trace.record(1)
            try:
                session.loop.run()
            finally:
                trace.stop_recording()
    update, loop = record.steps("update"), record.steps("step", "hooks")
    return StepTimes(record.steps("forward", "backward"), float(np.median(update)), float(np.median(loop)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Print no messages about the run."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
