"""A job in which one rank hangs in a layer or in a hook, is stopped by a signal, or exits early."""

import os
import signal
import time

import numpy as np

from mpitrain import Hook, Job, data, nn, optim
from mpitrain.process.launcher_env import launched_rank


class Endless(nn.Layer):
    """Loops forever in its n-th forward pass."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def forward(self, x, ctx):
        self.left -= 1
        while self.left == 0:
            pass
        return x

    def backward(self, dy):
        return dy


class Hang(Hook):
    """Sleeps, exits or stops its process after a step; all ranks take at least 5 ms per step."""

    def __init__(self, kind: str, at: int) -> None:
        self.kind, self.at = kind, at

    def after_step(self, loop) -> None:
        time.sleep(0.005)
        if loop.step < self.at:
            return
        if self.kind == "sleep":
            time.sleep(1000)
        if self.kind == "exit":
            os._exit(0)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def job(*, kind: str = "sleep", rank: int = 1, at: int = 20, steps: int = 2000) -> Job:
    """Train until one rank hangs.

    Args:
        kind: loop, sleep, stop, exit (with status 0), or none.
        rank: The rank that hangs.
        at: The step in which this rank hangs.
    """
    hangs = launched_rank(os.environ) == rank
    rng = np.random.default_rng(0)
    x = rng.standard_normal((600, 8)).astype(np.float32)
    return Job(
        model=nn.Sequential(Endless(at if hangs and kind == "loop" else 0), nn.Dense(8, 3)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.1),
        train=data.from_arrays(x, rng.integers(0, 3, 600)),
        batch_size=10,
        train_steps=steps,
        hooks=[Hang(kind if hangs else "none", at)],
    )
