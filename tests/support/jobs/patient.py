"""A run in which one operation takes long and nothing hangs."""

import os
import time

import numpy as np

from mpitrain import Hook, Job, data, nn, optim
from mpitrain.process.launcher_env import launched_rank

STEPS = 60


class Sleep(nn.Layer):
    """Sleeps once, in the n-th forward pass of training or in the first one of validation."""

    def __init__(self, step: int, training: bool, seconds: float) -> None:
        super().__init__()
        self.left, self.training, self.seconds = step, training, seconds

    def forward(self, x, ctx):
        if ctx.training == self.training:
            self.left -= 1
            if self.left == 0:
                time.sleep(self.seconds)
        return x

    def backward(self, dy):
        return dy


class Pause(Hook):
    """Sleeps 5 ms after each step; after half of the steps, delays one step or one ``fsync`` by ``seconds``."""

    def __init__(self, slow_hook: bool, slow_disk: bool, seconds: float) -> None:
        self.slow_hook, self.slow_disk, self.seconds = slow_hook, slow_disk, seconds

    def after_step(self, loop) -> None:
        time.sleep(0.005)
        if loop.step < STEPS // 2:
            return
        if self.slow_hook:
            self.slow_hook = False
            time.sleep(self.seconds)
        if self.slow_disk:
            self.slow_disk = False
            fsync = os.fsync

            def slow(descriptor: int) -> None:
                os.fsync = fsync
                time.sleep(self.seconds)
                fsync(descriptor)

            os.fsync = slow


def job(*, slow: str = "none", seconds: float = 90.0, rank: int = 1) -> Job:
    """Train with one slow operation.

    Args:
        slow: start, step, hook, validation, save, or none.
        seconds: Duration of the slow operation.
        rank: The rank on which the operation is slow; a save is slow on all ranks.
    """
    here = launched_rank(os.environ) == rank
    if here and slow == "start":
        time.sleep(seconds)
    layers = []
    if here and slow in ("step", "validation"):
        layers = [Sleep(STEPS // 2 if slow == "step" else 1, slow == "step", seconds)]
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((600, 8)).astype(np.float32), rng.integers(0, 3, 600)
    return Job(
        model=nn.Sequential(*layers, nn.Dense(8, 3)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.1),
        train=data.from_arrays(x, y),
        validation=data.from_arrays(x, y),
        batch_size=10,
        train_steps=STEPS,
        hooks=[Pause(here and slow == "hook", slow == "save", seconds)],
    )
