"""A run whose outputs grow from 0 towards 10; the metric ``far`` is smallest when their mean is near 5."""

import os

import numpy as np

from mpitrain import Hook, Job, data, nn, optim


class Crash(Hook):
    """Raises an exception after the step that the environment variable CRASH_AT gives."""

    def after_step(self, loop) -> None:
        if loop.step == int(os.environ.get("CRASH_AT", "-1")):
            raise RuntimeError("crash")


class Count:
    """The number of examples, as a metric with the interface of torchmetrics."""

    def reset(self) -> None:
        self.count = 0

    def update(self, outputs, labels) -> None:
        assert outputs.shape == (len(labels), 1)
        self.count += len(labels)

    def compute(self):
        return np.float32(self.count)


def fail(outputs, labels):
    return outputs[:, 1]


BAD = {"fails": fail, "array": lambda outputs, labels: outputs}


def job(bad: str = "", n_validation: int = 11, learning_rate: float = 0.02) -> Job:
    """Train a linear model.

    Args:
        bad: Name of a metric of ``BAD`` to add, which is not valid; empty for none.
        n_validation: Number of validation examples.
    """
    labels = np.full(60, 10.0, np.float32)
    validation = data.from_arrays(np.arange(n_validation)[:, None] % 2 + np.float32(1), labels[:n_validation])
    metrics = {
        "far": lambda outputs, labels: abs(outputs.mean() - 5),
        "parts": lambda outputs, labels: {"low": outputs.min(), "high": outputs.max()},
        "count": Count(),
        "order": lambda outputs, labels: (np.diff(outputs[:, 0])[::2] > 0).all(),  # 1, 2, 1, 2, ...
    }
    return Job(
        model=nn.Sequential(nn.Dense(1, 1)),
        loss=nn.MeanSquaredError(),
        optimizer=optim.sgd(learning_rate),
        train=data.from_arrays(np.ones((60, 1), np.float32), labels),
        validation=validation,
        batch_size=4,
        train_steps=60,
        hooks=[Crash()],
        metrics=metrics | ({bad: BAD[bad]} if bad else {}),
    )
