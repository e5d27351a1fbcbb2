"""Optimizers that update flat vectors, learning rate schedules, and moving averages of parameters."""

from . import rules
from .average import moving_average
from .optimizer import Optimizer, TrustRatio
from .rules import *  # noqa: F403
from .schedule import Schedule, by_epoch, constant, cosine, exponential, join, piecewise, polynomial, warm_up
from .updater import Updater

__all__ = [
    "Optimizer",
    "Schedule",
    "TrustRatio",
    "Updater",
    "by_epoch",
    "constant",
    "cosine",
    "exponential",
    "join",
    "moving_average",
    "piecewise",
    "polynomial",
    "warm_up",
]
__all__ += rules.__all__
