"""A run that a hook finishes early; the hook has state."""

import time

from mpitrain import Hook, Job, data, nn, optim


class Patience(Hook):
    """Finishes training after ``limit`` steps of this and earlier attempts."""

    def __init__(self, limit: int, pause: float) -> None:
        self.limit, self.pause, self.seen = limit, pause, 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def after_step(self, loop) -> None:
        time.sleep(self.pause)
        self.seen += 1
        if self.seen >= self.limit and loop.cluster.workers.rank == loop.cluster.workers.size - 1:
            loop.stop(f"seen {self.seen} steps")


def job(limit: int = 1000, hidden_units: int = 8, learning_rate: float = 0.01, pause: float = 0.0) -> Job:
    """Train on the embedded digits.

    Args:
        limit: Steps until the hook finishes training.
        pause: Seconds to sleep after each step.
    """
    digits = data.mnist(None)
    return Job(
        model=nn.Sequential(nn.Dense(digits.features, hidden_units), nn.ReLU(), nn.Dense(hidden_units, 10)),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.adam(learning_rate),
        train=digits.train,
        validation=digits.validation,
        batch_size=4,
        train_steps=60,
        hooks=[Patience(limit, pause)],
    )
