"""A job in whose training data one example is NaN."""

import numpy as np

from mpitrain import Job, data, nn, optim


def job() -> Job:
    """Train on the embedded digits; each bias of 10 elements is followed by a gap in the vector of parameters."""
    digits = data.mnist(None)
    batch = digits.train.read_batch(0, len(digits.train))
    examples = np.float32(batch.examples) * np.float32(digits.train.scale)
    examples[5] = np.nan
    return Job(
        model=nn.Sequential(nn.Dense(digits.features, 10), nn.Tanh(), nn.Dense(10, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(0.01),
        train=data.from_arrays(examples, batch.labels),
        batch_size=36,
        train_steps=60,
    )
