"""A slow run, so that tests can act on it while it trains."""

import time

from mpitrain import Hook, Job, data, nn, optim


class Pause(Hook):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def after_step(self, loop) -> None:
        time.sleep(self._seconds)


def job(pause: float = 0.0, learning_rate: float = 0.01) -> Job:
    """Train on the embedded digits.

    Args:
        pause: Seconds to sleep after each step.
        learning_rate: Adam's learning rate.
    """
    digits = data.mnist(None)
    return Job(
        model=nn.Sequential(nn.Dense(digits.features, 8), nn.ReLU(), nn.Dropout(0.2), nn.Dense(8, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(learning_rate),
        train=digits.train,
        validation=digits.validation,
        batch_size=4,
        train_steps=100,
        hooks=[Pause(pause)] if pause else [],
    )
