"""An exponential moving average of the parameters, for validation and for use after training."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import JobError


@dataclass(frozen=True)
class moving_average:
    """Sets ``average = decay * average + (1 - decay) * params`` after every step, from the initial parameters.

    With ``warm_up`` the decay at 0-based step t is at most ``(1 + t) / (10 + t)``, so that the average quickly forgets
    the initial values (like TensorFlow's ExponentialMovingAverage with ``num_updates``). State, such as the running
    statistics of BatchNorm, is copied, because it is an average already.

    Raises:
        JobError: ``decay`` is not in [0, 1).
    """

    decay: float
    warm_up: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.decay, (int, float)) or not 0 <= self.decay < 1:
            raise JobError(f"moving_average: decay is {self.decay!r}, must be in [0, 1), such as 0.999")

    def decay_at(self, step: int) -> float:
        """Return the decay at ``step``."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warm_up else self.decay
