"""A job with 1 GiB of state that records the time of every step, for ``bench/background_save.py``."""

import json
import time
from pathlib import Path

import numpy as np

from mpitrain import Hook, Job, data, nn, optim


class Clock(Hook):
    """Records the end of each step, after the hooks that save."""

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, [time.perf_counter()]

    def begin(self, loop) -> None:
        self.times = [time.perf_counter()]

    def after_step(self, loop) -> None:
        self.times.append(time.perf_counter())

    def end(self, loop) -> None:
        if loop.cluster.chief:
            self.path.write_text(json.dumps(np.diff(self.times).tolist()))


def job(times: Path, side: int = 3344, examples: int = 16) -> Job:
    """Train eight square layers on noise.

    Args:
        times: File for the seconds of every step.
        side: Width of the layers.
        examples: Examples per step. With few examples memory bandwidth limits the step, with many the cores.
    """
    rng = np.random.default_rng(0)
    images = rng.standard_normal((4 * examples, side)).astype(np.float32)
    return Job(
        model=nn.Sequential(*(nn.Dense(side, side) for _ in range(8))),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(1e-6),
        train=data.from_arrays(images, np.zeros(4 * examples, np.int64), classes=side),
        batch_size=examples,
        hooks=[Clock(times)],
    )
