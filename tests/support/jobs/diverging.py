"""A job whose loss is NaN once: in step 8, on worker 1 alone."""

import time

import numpy as np

from mpitrain import Job, data, nn, optim
from mpitrain.comm.mpi import MPI


class NanOnce(nn.Layer):
    """Passes its input on, but for one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x, ctx):
        if not ctx.training:
            return x
        self.calls += 1
        if MPI.COMM_WORLD.rank != 1:
            time.sleep(0.001)  # where workers keep no common pace, leave the other one its turns
            return x
        return x * np.nan if self.calls == 8 else x

    def backward(self, dy):
        return dy


def job() -> Job:
    digits = data.mnist(None)
    return Job(
        model=nn.Sequential(nn.Dense(digits.features, 10), NanOnce(), nn.Dense(10, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.01),
        train=digits.train,
        validation=digits.validation,
        batch_size=10,
        train_steps=20,
    )
