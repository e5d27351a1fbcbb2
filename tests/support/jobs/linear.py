"""Softmax regression on synthetic examples, small enough for a simulation in NumPy; rank 0 can send itself a signal."""

import os
import signal
from pathlib import Path

import numpy as np

from mpitrain import Hook, Job, data, nn, optim

N, FEATURES, CLASSES, BATCH, RATE, MOMENTUM = 96, 20, 10, 4, 0.05, 0.8


def examples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.normal(size=(N, FEATURES)), random.integers(0, CLASSES, N)


class SignalOnce(Hook):
    """Sends a signal to the process of rank 0 after a step, unless the file ``mark`` exists."""

    def __init__(self, number: int, step: int, mark: Path) -> None:
        self._number, self._step, self._mark = number, step, mark

    def after_step(self, loop) -> None:
        if loop.step == self._step and loop.cluster.rank == 0 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), self._number)


def job(signal_name: str = "", at_step: int = 0, mark: Path | None = None) -> Job:
    """Train.

    Args:
        signal_name: The signal, such as SIGKILL; empty for none.
        at_step: The step after which rank 0 sends the signal to itself.
        mark: A file that rank 0 creates before it sends the signal.
    """
    return Job(
        model=nn.Sequential(nn.Dense(FEATURES, CLASSES)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.momentum(RATE, MOMENTUM),
        train=data.from_arrays(*examples()),
        batch_size=BATCH,
        train_steps=40,
        hooks=[SignalOnce(getattr(signal, signal_name), at_step, mark)] if signal_name and mark else [],
    )
