"""Layers with forward and backward, losses and initializers."""

from . import activation
from .activation import *  # noqa: F403
from .container import Residual, Sequential
from .conv import Conv2D
from .dense import Dense, Embedding
from .dropout import Dropout
from .init import constant, glorot_normal, glorot_uniform, he_normal, he_uniform, ones, truncated_normal, zeros
from .layer import Context, Initializer, Layer, bind, initialize, layout_of, walk
from .loss import Loss, MeanSquaredError, SigmoidCrossEntropy, SoftmaxCrossEntropy
from .normalize import BatchNorm, LayerNorm
from .pool import AveragePool, MaxPool
from .shape import Flatten, Reshape

__all__ = [
    "AveragePool",
    "BatchNorm",
    "Context",
    "Conv2D",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "Initializer",
    "Layer",
    "LayerNorm",
    "Loss",
    "MaxPool",
    "MeanSquaredError",
    "Reshape",
    "Residual",
    "Sequential",
    "SigmoidCrossEntropy",
    "SoftmaxCrossEntropy",
    "bind",
    "constant",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "initialize",
    "layout_of",
    "ones",
    "truncated_normal",
    "walk",
    "zeros",
]
__all__ += activation.__all__
