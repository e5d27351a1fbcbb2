"""Three epochs of 60 numbers; fails unless the workers together received each number once per epoch."""

from itertools import chain

import numpy as np

from mpitrain import Hook, Job, data, nn, optim

COUNT, EPOCHS = 60, 3


class Recording(nn.Layer):
    """Records the examples that it receives in training, and the position of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, list[int]]] = []

    def forward(self, x, ctx):
        if ctx.training:
            self.seen.append((ctx.position, x[:, 0].astype(int).tolist()))
        return x

    def backward(self, dy):
        return dy


class Check(Hook):
    """Checks the records of all workers at the end."""

    def __init__(self, layer: Recording) -> None:
        self.layer = layer

    def end(self, loop) -> None:
        batches = chain.from_iterable(loop.cluster.workers.allgather(self.layer.seen))
        stream = [number for _, batch in sorted(batches) for number in batch]
        assert len(stream) == COUNT * EPOCHS
        epochs = np.reshape(stream, (EPOCHS, COUNT))
        for epoch in epochs:
            assert sorted(epoch) == list(range(COUNT)), epoch
        assert not (epochs[0] == epochs[1]).all()


def job() -> Job:
    layer = Recording()
    numbers = np.arange(COUNT, dtype=np.float32)[:, np.newaxis]
    return Job(
        model=nn.Sequential(layer, nn.Dense(1, 2)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.0),
        train=data.from_arrays(numbers, np.zeros(COUNT, np.int64)),
        hooks=[Check(layer)],
    )
