"""A job in which rank 1 raises an exception at a chosen place."""

from typing import Literal

from mpitrain import Hook, Job, data, nn, optim
from mpitrain.comm.mpi import MPI


def fail_if(now: bool) -> None:
    if now and MPI.COMM_WORLD.rank == 1:
        raise ValueError("on purpose")


class Failing(nn.Layer):
    """Returns its input unless it should fail."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, x, ctx):
        fail_if(self.fails)
        return x

    def backward(self, dy):
        return dy


class FailingHook(Hook):
    """Fails after step 5 if ``where`` is "hook", and at the end if ``where`` is "end"."""

    def __init__(self, where: str) -> None:
        self.where = where

    def after_step(self, loop) -> None:
        fail_if(self.where == "hook" and loop.step >= 5)

    def end(self, loop) -> None:
        fail_if(self.where == "end")


def job(where: Literal["job", "forward", "hook", "end"] = "job") -> Job:
    fail_if(where == "job")
    digits = data.mnist(None)
    return Job(
        model=nn.Sequential(nn.Dense(digits.features, 10), Failing(where == "forward")),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.01),
        train=digits.train,
        batch_size=10,
        # The other ranks must not end before a slow rank 1 fails: with backup workers they do not wait for rank 1.
        train_steps=200 if where == "end" else 20_000,
        hooks=[FailingHook(where)],
    )
