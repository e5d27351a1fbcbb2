"""A small model whose ranks mostly sleep, so that simulated hosts can share cores: for ``bench/recovery.py``."""

import time

from mpitrain import Hook, Job, data, nn, optim


class Rest(Hook):
    def after_step(self, loop) -> None:
        time.sleep(0.1)


def job(torch: bool = False) -> Job:
    """Train a linear model.

    Args:
        torch: Whether the model is a module of PyTorch.
    """
    digits = data.mnist()
    model, loss = nn.Dense(digits.features, 10), nn.SoftmaxCrossEntropy()
    if torch:
        from torch import nn as torch_nn

        model, loss = torch_nn.Linear(digits.features, 10), torch_nn.CrossEntropyLoss()
    return Job(model, loss, optim.adam(0.001), digits.train, hooks=[Rest()])
