"""Optimizers that update flat vectors, learning rate schedules, and moving averages of parameters."""

from .average import moving_average
from .optimizer import Optimizer, adagrad, adam, adamw, lamb, lars, momentum, nesterov, rmsprop, sgd
from .schedule import Schedule, by_epoch, constant, cosine, exponential, join, piecewise, polynomial, warm_up
from .updater import Updater

__all__ = [
    "Optimizer",
    "Schedule",
    "Updater",
    "adagrad",
    "adam",
    "adamw",
    "by_epoch",
    "constant",
    "cosine",
    "exponential",
    "join",
    "lamb",
    "lars",
    "momentum",
    "moving_average",
    "nesterov",
    "piecewise",
    "polynomial",
    "rmsprop",
    "sgd",
    "warm_up",
]
