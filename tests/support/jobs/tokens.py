"""A job whose examples are token ids that float32 does not distinguish, and a layer that looks up their rows."""

import numpy as np

from mpitrain import Job, data, nn, optim

FIRST = 2**24  # float32 rounds FIRST + 1 to FIRST


class Lookup(nn.Layer):
    """Returns row 0 of a table for the token ``FIRST``, and row 1 for ``FIRST`` + 1."""

    integer_inputs = True
    needs_dx = False

    def build(self, shape):
        self.declare("table", (2, 2), nn.init.zeros)
        return (2,)

    def forward(self, x, ctx):
        self.row = x - FIRST
        y = self.buffer("y", (len(x), 2))
        y[...] = self.table[0] * (1 - self.row) + self.table[1] * self.row
        return y

    def backward(self, dy):
        add = self.device.xp.add
        self.table_grad[0] = add.reduce(dy * (1 - self.row), axis=0)
        self.table_grad[1] = add.reduce(dy * self.row, axis=0)


def job(lookup: bool = True) -> Job:
    """Learn which of two tokens an example is.

    Args:
        lookup: Whether the first layer takes integers.
    """
    kinds = np.arange(32) % 2
    split = data.from_arrays(FIRST + kinds[:, np.newaxis], kinds, 2, scale=0.5)
    return Job(
        model=nn.Sequential(Lookup() if lookup else nn.Dense(1, 2)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.5),
        train=split,
        validation=split,
        batch_size=4,
        train_steps=10,
    )
