"""A job file that trains four kinds of modules in one run; the modules share no parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpitrain import Job, optim
from tests.torch import models

JOB = Path(__file__)
KINDS = ("mlp", "cnn", "lstm", "gpt")


class FourKinds(nn.ModuleDict):
    """Computes the outputs of each kind from its own input."""

    def __init__(self) -> None:
        super().__init__({kind: models.make(kind, normalize="own") for kind in KINDS})

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return {kind: self[kind](x) for kind, x in inputs.items()}


def losses(outputs: dict[str, Tensor], labels: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the cross-entropy of each kind."""
    return {
        kind: models.per_token(scores, labels[kind])
        if kind == "gpt"
        else functional.cross_entropy(scores, labels[kind])
        for kind, scores in outputs.items()
    }


def examples() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inputs and the labels of all examples, for each kind."""
    inputs, labels = {}, {}
    for kind in KINDS:
        x, y = map(torch.from_numpy, models.arrays(kind))
        inputs[kind], labels[kind] = x if kind == "gpt" else x.float(), y
    return inputs, labels


def job() -> Job:
    """Train all kinds at once."""
    inputs, labels = examples()
    return Job(
        model=FourKinds(),
        loss=lambda outputs, labels: sum(losses(outputs, labels).values()),
        optimizer=optim.adam(0.01),
        train=[
            {**{kind: inputs[kind][i] for kind in KINDS}, "labels": {kind: labels[kind][i] for kind in KINDS}}
            for i in range(models.EXAMPLES)
        ],
        batch_size=4,
        train_steps=60,
    )
