"""A job whose examples are loaded one by one and transformed randomly."""

from __future__ import annotations

import numpy as np

from mpitrain import Job, data, nn, optim

EXAMPLES, FEATURES, CLASSES = 50, 6, 3


def noisy(example: tuple[np.ndarray, int], rng: np.random.Generator) -> tuple[np.ndarray, int]:
    values, label = example
    return values + rng.normal(0, 0.1, FEATURES) + 0.1 * np.random.rand(), label


def job(batch: int = 12) -> Job:
    rng = np.random.default_rng(0)
    split = data.from_arrays(rng.random((EXAMPLES, FEATURES)), np.arange(EXAMPLES) % CLASSES, CLASSES)
    return Job(
        model=nn.Sequential(nn.Dense(FEATURES, 8), nn.Tanh(), nn.Dense(8, CLASSES)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.momentum(0.1),
        train=split.random_map(noisy).ordered(data.orders.Weighted(np.arange(EXAMPLES))),
        validation=split.map(lambda example: example),
        batch_size=batch,
        train_steps=20,
    )
