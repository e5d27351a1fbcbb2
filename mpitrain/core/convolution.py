"""The interface of a device's operations for convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .layout import Array, Shape

Operation = Callable[[Array, Array, Array], None]


class ConvolutionShape(NamedTuple):
    """The shapes of a convolution.

    Attributes:
        images: (batch, height, width, channels).
        filters: (filters, height, width, channels).
        outputs: (batch, height, width, filters).
        stride: Stride of the window, down and right.
        padding: Zeros before and after an image's rows, and its columns.
    """

    images: Shape
    filters: Shape
    outputs: Shape
    stride: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]


class Convolution(NamedTuple):
    """The operations of a convolution that a device computes faster than products of windows.

    An operation that is None is computed by products of windows. The last argument of each operation is its output.

    Attributes:
        forward: Called with ``x``, ``filters``, ``y``.
        data_gradient: Called with ``dy``, ``filters``, ``dx``.
        filter_gradient: Called with ``x``, ``dy``, ``filters_grad``.
        grad_dtype: Data type of ``filters_grad``; None for the parameters' type.
        filters_last: Whether ``filters`` and ``filters_grad`` have the shape (height, width, channels, filters) instead
            of (filters, height, width, channels).
    """

    forward: Operation | None = None
    data_gradient: Operation | None = None
    filter_gradient: Operation | None = None
    grad_dtype: np.dtype[Any] | None = None
    filters_last: bool = False
