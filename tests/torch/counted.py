"""A job whose labels count unequally: most are ignored on some ranks, and classes have weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mpitrain import Job, data, optim
from mpitrain.data.permutation import order

TOTAL, CLASSES = 12, 3  # examples of a step
IGNORED = (4, 11, 12, 6)  # number of labels that are ignored in each step, the first ones


def arrays(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return examples and labels; with ``seed``, whole batches and ranks of a step have no label that counts."""
    count = TOTAL * len(IGNORED)
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((count, 4)).astype(np.float32), rng.integers(0, CLASSES, count)
    chosen = order(0, count, count, seed, None)
    for step, ignored in enumerate(IGNORED):
        y[chosen[step * TOTAL : step * TOTAL + ignored]] = -100
    return x, y


def make_loss(weighted: bool) -> nn.Module:
    return nn.CrossEntropyLoss(torch.tensor([0.1, 1.0, 5.0]) if weighted else None, label_smoothing=0.1)


def make_model(normalize: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.SyncBatchNorm(5) if normalize else nn.Tanh(), nn.Linear(5, CLASSES))


def own_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def job(weighted: bool = False, normalize: bool = False, validation: str = "some", own: bool = False) -> Job:
    """Train with SGD; of the labels of ``validation``, "some" or "none" count.

    Args:
        own: Use a loss of the user's own, which gets outputs (n, 1) and labels (n,).
    """
    x, y = arrays()
    if own:
        split = data.from_arrays(x, np.ones(len(x), np.float32))
        return Job(nn.Linear(4, 1), own_loss, optim.sgd(0.1), split, split, train_steps=len(IGNORED))
    labels = y if validation == "some" else np.full_like(y, -100)
    splits = data.from_arrays(x, y), data.from_arrays(x, labels)
    return Job(make_model(normalize), make_loss(weighted), optim.sgd(0.1), *splits, train_steps=len(IGNORED))
