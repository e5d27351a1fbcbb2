"""A job whose loss is NaN on one worker only: in its eighth forward pass, with ``--repeat`` in every eighth pass."""

import time

import numpy as np

from mpitrain import Job, data, nn, optim
from mpitrain.comm.mpi import MPI


class Diverging(nn.Layer):
    """Returns its input; on rank 1, returns NaN for the eighth batch, with ``repeat`` for every eighth batch."""

    def __init__(self, repeat: bool) -> None:
        super().__init__()
        self.calls, self.repeat = 0, repeat

    def forward(self, x, ctx):
        if not ctx.training:
            return x
        self.calls += 1
        if MPI.COMM_WORLD.rank != 1:
            time.sleep(0.001)  # in modes without synchronization, rank 1 must take steps, too
            return x
        return x * np.nan if self.calls == 8 or (self.repeat and self.calls % 8 == 0) else x

    def backward(self, dy):
        return dy


def job(repeat: bool = False) -> Job:
    digits = data.mnist(None)
    return Job(
        model=nn.Sequential(nn.Dense(digits.features, 10), Diverging(repeat), nn.Dense(10, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.01),
        train=digits.train,
        validation=digits.validation,
        batch_size=10,
        train_steps=20,
    )
