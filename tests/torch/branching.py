"""A job file with a module whose layers, and their order, depend on the examples of the batch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from mpitrain import Job, data, optim
from tests.torch import models

JOB = Path(__file__)


def route(x: Tensor) -> int:
    """Return the branch for a batch: 0, 1 or 2."""
    return int(x.abs().sum() * 10) % 3


class Branching(nn.Module):
    """Uses two layers in this order, in the opposite order, or one of them. Records the number of torch's threads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(12, size) for size in (12, 12, 12, 3))
        self.register_buffer("threads", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.threads.fill_(torch.get_num_threads())
        hidden = self.first(x)
        for layer in ((self.left, self.right), (self.right, self.left), (self.right,))[route(x)]:
            hidden = layer(hidden).tanh()
        return self.last(hidden)


def job() -> Job:
    """Train the module."""
    return Job(
        model=Branching(),
        loss=nn.CrossEntropyLoss(),
        optimizer=optim.momentum(0.1),
        train=data.from_arrays(*models.arrays("mlp")),
        batch_size=4,
        train_steps=20,
    )
