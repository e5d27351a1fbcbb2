"""A network whose layers sleep as long as an accelerator would compute, and longer on a slow worker."""

from __future__ import annotations

import time

from mpitrain import Job, data, nn, optim
from mpitrain.comm.mpi import MPI


class Pause(nn.Layer):
    """Returns its input after a delay, and its gradient after twice as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x, ctx):
        if ctx.training:
            time.sleep(self.seconds)
        return x

    def backward(self, dy):
        time.sleep(2 * self.seconds)
        return dy


def job(
    layer_ms: float = 1.0, layers: int = 6, width: int = 512, slow_worker: int = -1, slow_factor: float = 3.0
) -> Job:
    """Train a network on the embedded digits.

    Args:
        layer_ms: Milliseconds that each hidden layer takes in the forward pass.
        layers: Number of hidden layers.
        width: Width of the hidden layers.
        slow_worker: The rank that takes longer; -1 for none.
        slow_factor: Factor by which that rank takes longer.
    """
    digits = data.mnist(None)
    is_slow = MPI.Is_initialized() and MPI.COMM_WORLD.rank == slow_worker
    seconds = layer_ms / 1000 * (slow_factor if is_slow else 1.0)
    hidden = [layer for _ in range(layers) for layer in (Pause(seconds), nn.Dense(width, width), nn.ReLU())]
    return Job(
        model=nn.Sequential(nn.Dense(digits.features, width), nn.ReLU(), *hidden, nn.Dense(width, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.momentum(0.01, 0.9),
        train=digits.train,
        batch_size=8,
        train_steps=100,
    )
