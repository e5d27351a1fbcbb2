"""Sixty distinct numbers; every worker writes which of them it has received."""

import json
from pathlib import Path

import numpy as np

from mpitrain import Hook, Job, data, nn, optim


class Noting(nn.Layer):
    """Records the examples that it receives in training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x, ctx):
        if ctx.training:
            self.seen += (60 * x[:, 0]).round().astype(int).tolist()
        return x

    def backward(self, dy):
        return dy


class Leave(Hook):
    """Writes the examples that the layer has recorded."""

    def __init__(self, layer: Noting, folder: Path) -> None:
        self.layer, self.folder = layer, folder

    def end(self, loop) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"{loop.cluster.workers.rank}.json").write_text(json.dumps(self.layer.seen))


def job(seen_dir: Path) -> Job:
    """Train on numbers.

    Args:
        seen_dir: The folder in which workers write the numbers that they have received.
    """
    layer = Noting()
    numbers = (np.arange(60, dtype=np.float64) / 60)[:, np.newaxis]
    split = data.from_arrays(numbers, (numbers[:, 0] > 0.5).astype(np.int64), classes=2)
    return Job(
        model=nn.Sequential(layer, nn.Dense(1, 7), nn.Tanh(), nn.Dense(7, 2)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.1),
        train=split,
        validation=split,
        moving_average=optim.moving_average(0.5),
        hooks=[Leave(layer, seen_dir)],
    )
