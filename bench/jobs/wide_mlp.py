"""Two wide layers, 4096-4096-4096, on noise: for ``bench/gpu.py``."""

import numpy as np

from mpitrain import Job, data, nn, optim


def job(side: int = 4096, examples: int = 16384) -> Job:
    """Train on random bytes.

    Args:
        side: Width of the layers.
        examples: Number of examples.
    """
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (examples, side), np.uint8)
    return Job(
        model=nn.Sequential(nn.Dense(side, side), nn.ReLU(), nn.Dense(side, side)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(1e-4),
        train=data.from_arrays(pictures, rng.integers(0, side, examples), classes=side, scale=1 / 255),
        batch_size=8192,
        train_steps=200,
    )
