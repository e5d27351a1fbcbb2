"""Times of training steps that all ranks take at once without communication, and the spread of these times."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ..comm.cluster import Cluster
from ..plan.hook import Hook, TrainingLoop
from ..plan.job import Job
from ..process.rank_status import RankStatusFile
from ..training.session import training_session
from ..training.setup import TrainRequest

_FEWEST, _MOST = 20, 1000


class _RecordSteps(Hook):
    """Records when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_step(self, loop: TrainingLoop) -> None:
        self.ends.append(time.perf_counter())


def step_times(
    cluster: Cluster, request: TrainRequest, rank_status: RankStatusFile, step_s: float, seconds: float
) -> list[float]:
    """Train each worker alone for about this number of seconds; return the times of its steps. Collective over all.

    Args:
        step_s: About how long a step takes.
    """
    steps = int(min(_MOST, max(_FEWEST, seconds / step_s)))
    record = _RecordSteps()

    def make() -> Job:
        job = request.make()
        return replace(job, hooks=[*job.hooks, record], validation=None, metrics={})

    options = {name: value for name, value in request.config.options().items() if value is not None}
    options |= {
        "mode": "local", "local_steps": steps, "train_steps": steps, "validate_steps": 0, "validate_secs": 0,
        "log_steps": 0, "tensorboard": False, "resume": "never",
    }  # fmt: skip
    config = type(request.config).of(**options)
    with _quiet(), training_session(cluster, replace(request, config=config, make=make), rank_status) as session:
        if session.loop is not None:
            session.loop.run()
    ends = record.ends[steps // 10 :]
    return [end - before for before, end in pairwise(ends)][:-1]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Print no messages about the run."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
