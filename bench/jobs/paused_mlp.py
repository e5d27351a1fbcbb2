"""One hidden layer on Fashion-MNIST, on a machine that can be made slower: for ``bench/learners.py``."""

import time
from pathlib import Path

from mpitrain import Hook, Job, data, nn, optim


class Pause(Hook):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def after_step(self, loop) -> None:
        if self._seconds:
            time.sleep(self._seconds)


def job(data_dir: Path, hidden_units: int = 500, pause: float = 0.0) -> Job:
    """Train a multilayer perceptron.

    Args:
        data_dir: Folder with the four IDX files.
        hidden_units: Width of the hidden layer.
        pause: Seconds to sleep after each step.
    """
    images = data.mnist(data_dir)
    return Job(
        model=nn.Sequential(nn.Dense(images.features, hidden_units), nn.ReLU(), nn.Dense(hidden_units, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.001),
        train=images.train,
        validation=images.validation,
        batch_size=100,
        hooks=[Pause(pause)],
        train_steps=10_000,
    )
