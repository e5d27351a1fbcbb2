"""A multilayer perceptron on MNIST-format images, of any width and depth: for ``bench/links.py``."""

import itertools
from pathlib import Path

from mpitrain import Job, data, nn, optim


def job(data_dir: Path, hidden: int = 1024, layers: int = 1) -> Job:
    """Train a multilayer perceptron.

    Args:
        data_dir: Folder with the four IDX files.
        hidden: Width of the hidden layers.
        layers: Number of hidden layers.
    """
    images = data.mnist(data_dir)
    widths = [images.features, *[hidden] * layers]
    pairs = itertools.pairwise(widths)
    hidden_layers = [layer for a, b in pairs for layer in (nn.Dense(a, b), nn.ReLU())]
    return Job(
        model=nn.Sequential(*hidden_layers, nn.Dense(hidden, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.001),
        train=images.train,
        batch_size=100,
        train_steps=1000,
    )
