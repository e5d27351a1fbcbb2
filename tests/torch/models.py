"""A job file with small PyTorch modules of several kinds, and the data that they train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpitrain import Hook, Job, data, optim
from mpitrain.plan.hook import TrainingLoop

EXAMPLES, TOKENS, WIDTH = 96, 11, 8
KINDS = ("mlp", "cnn", "lstm", "gpt")


class LastOutput(nn.Module):
    """An LSTM that classifies a sequence by its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Gpt(nn.Module):
    """A transformer of one block, whose output weights are its embedding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.triu(torch.ones(6, 6, dtype=torch.bool), 1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens), src_mask=self.mask))


class AllKinds(nn.ModuleDict):
    """A module of each kind; each module gets some columns of the examples."""

    def forward(self, x: Tensor) -> list[Tensor]:
        features, sequence, tokens = x.split([12, 20, 6], dim=1)
        inputs = {"mlp": features, "cnn": features, "lstm": sequence.unflatten(1, (5, 4)), "gpt": tokens.long()}
        return [self[kind](inputs[kind]) for kind in KINDS]


def per_token(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of all tokens."""
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def all_losses(outputs: list[Tensor], labels: Tensor) -> Tensor:
    """Return the sum of the losses of all kinds."""
    *others, gpt = outputs
    return per_token(gpt, labels[:, 1:]) + sum(functional.cross_entropy(scores, labels[:, 0]) for scores in others)


def make(kind: str, normalize: str = "sync", dropout: float = 0.0) -> nn.Module:
    """Return a module of a kind: mlp, cnn, lstm, gpt or all."""
    if kind == "all":
        return AllKinds({each: make(each, normalize, dropout) for each in KINDS})
    if kind == "mlp":
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
    if kind == "cnn":
        norm = {"sync": nn.SyncBatchNorm, "own": nn.BatchNorm2d}[normalize]
        return nn.Sequential(
            nn.Unflatten(1, (1, 3, 4)),
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            norm(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(48, 3),
        )
    return LastOutput() if kind == "lstm" else Gpt(dropout)


def loss_of(kind: str) -> Callable[[Any, Tensor], Tensor]:
    """Return the loss of a kind."""
    return {"gpt": per_token, "all": all_losses}.get(kind) or nn.CrossEntropyLoss()


def arrays(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the examples and labels of a kind."""
    if kind == "all":
        (x, y), (sequences, _), (tokens, following) = arrays("mlp"), arrays("lstm"), arrays("gpt")
        return np.hstack([x, sequences.reshape(EXAMPLES, -1), tokens]), np.hstack([y[:, None], following])
    rng = np.random.default_rng(5)
    if kind == "gpt":
        tokens = rng.integers(0, TOKENS, (EXAMPLES, 7))
        return tokens[:, :-1], tokens[:, 1:]
    shape = (5, 4) if kind == "lstm" else (12,)
    return rng.standard_normal((EXAMPLES, *shape)), rng.integers(0, 3, EXAMPLES)


class Change(Hook):
    """On request, freezes the first parameter when training begins, or makes the backward pass of a worker fail."""

    def __init__(self, model: nn.Module, freeze: bool, fail_on: int) -> None:
        self.model, self.freeze, self.fail_on = model, freeze, fail_on

    def begin(self, loop: TrainingLoop) -> None:
        if self.freeze:
            next(self.model.parameters()).requires_grad_(False)

    def after_step(self, loop: TrainingLoop) -> None:
        if loop.step == 4 and loop.cluster.task_index == self.fail_on:
            next(self.model.parameters()).register_hook(self.fail)

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("this gradient cannot be computed")


def job(
    kind: str = "mlp",
    optimizer: str = "adam",
    normalize: str = "sync",
    dropout: float = 0.0,
    average: bool = False,
    clip_norm: float = 0.0,
    dataset: str = "arrays",
    freeze: bool = False,
    fail_on: int = -1,
) -> Job:
    """Train a small module.

    Args:
        kind: mlp, cnn, lstm, gpt or all.
        optimizer: A name in optim.
        normalize: Statistics of the cnn's BatchNorm: sync for all workers' batches, own for each worker's batch.
        dropout: Fraction of dropped values.
        average: Whether to keep a moving average of the parameters.
        clip_norm: Largest norm of the gradient; 0 for no limit.
        dataset: arrays or tensors, the form of the examples.
        freeze: Whether to freeze the first parameter when training begins.
        fail_on: Worker whose backward pass fails in the fifth step.
    """
    model = make(kind, normalize, dropout)
    examples, labels = arrays(kind)
    split: object = data.from_arrays(examples, labels)
    if dataset == "tensors":
        kept = torch.from_numpy(examples) if kind == "gpt" else torch.from_numpy(examples).float()
        split = [(example, label) for example, label in zip(kept, torch.from_numpy(labels), strict=True)]
    return Job(
        model=model,
        loss=loss_of(kind),
        optimizer=getattr(optim, optimizer)(0.01, clip_norm=clip_norm or None),
        train=split,
        validation=split,
        batch_size=4,
        train_steps=20,
        moving_average=optim.moving_average(0.9) if average else None,
        hooks=[Change(model, freeze, fail_on)],
    )
