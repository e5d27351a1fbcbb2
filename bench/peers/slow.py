"""The job of ``bench/stragglers.py``: a step sleeps as long as an accelerator would compute, on one worker longer."""

from __future__ import annotations

import time

from mpitrain import Job, data, nn, optim
from mpitrain.comm.mpi import MPI


class Pause(nn.Layer):
    """Returns its input after a delay."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x, ctx):
        if ctx.training:
            time.sleep(self.seconds)
        return x

    def backward(self, dy):
        return dy


def job(compute_ms: float = 20.0, slow_worker: int = -1) -> Job:
    """Train a small network on the embedded digits.

    Args:
        compute_ms: Duration of a step's sleep in milliseconds.
        slow_worker: The rank that sleeps ten times as long; -1 for none.
    """
    digits = data.mnist(None)
    slowed = 10.0 if MPI.Is_initialized() and MPI.COMM_WORLD.rank == slow_worker else 1.0
    return Job(
        model=nn.Sequential(
            Pause(slowed * compute_ms / 1000), nn.Dense(digits.features, 32), nn.ReLU(), nn.Dense(32, 10)
        ),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.001),
        train=digits.train,
        validation=digits.validation,
        batch_size=20,
        train_steps=100,
    )
