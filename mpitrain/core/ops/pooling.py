"""Maximum and average of the windows of images."""

from __future__ import annotations

import numpy as np

from ..kernels import kernel
from ..layout import Array


def max_pool(x: Array, size: int, stride: int, y: Array, place: Array) -> None:
    """Set ``y`` to the maximum of each window, and ``place``, uint8, to its index in the window, row by row.

    Arrays have shape (batch, height, width, channels); windows of ``size`` by ``size`` are ``stride`` apart.
    """
    if size == 2:
        _max_pool_2(x, stride, y, place)
    else:
        _max_pool(x, size, stride, y, place)


@kernel
def _max_pool(x: Array, size: int, stride: int, y: Array, place: Array) -> None:
    batch, height, width, channels = y.shape
    for n in range(batch):
        for i in range(height):
            for j in range(width):
                largest, source = y[n, i, j], place[n, i, j]
                corner = x[n, i * stride, j * stride]
                for c in range(channels):
                    largest[c], source[c] = corner[c], 0
                for k in range(1, size * size):
                    window, index = x[n, i * stride + k // size, j * stride + k % size], np.uint8(k)
                    for c in range(channels):
                        # Not "greater", which is false for NaN; a NaN that is the maximum stays.
                        value, other, kept = largest[c], window[c], source[c]
                        larger = not (other <= value) and value == value
                        largest[c], source[c] = other if larger else value, index if larger else kept


@kernel
def _max_pool_2(x: Array, stride: int, y: Array, place: Array) -> None:
    """``_max_pool`` for the common size 2, several times faster because it has no loop over the window."""
    for n in range(y.shape[0]):
        for i in range(y.shape[1]):
            upper, lower = x[n, i * stride], x[n, i * stride + 1]
            for j in range(y.shape[2]):
                first, second = upper[j * stride], upper[j * stride + 1]
                third, fourth = lower[j * stride], lower[j * stride + 1]
                largest, source = y[n, i, j], place[n, i, j]
                for c in range(y.shape[3]):
                    value, k = first[c], np.uint8(0)
                    larger = not (second[c] <= value) and value == value
                    value, k = second[c] if larger else value, np.uint8(1) if larger else k
                    larger = not (third[c] <= value) and value == value
                    value, k = third[c] if larger else value, np.uint8(2) if larger else k
                    larger = not (fourth[c] <= value) and value == value
                    largest[c], source[c] = fourth[c] if larger else value, np.uint8(3) if larger else k


def max_pool_backward(dy: Array, place: Array, size: int, stride: int, dx: Array) -> None:
    if stride == size and dx.shape[1] == dy.shape[1] * size and dx.shape[2] == dy.shape[2] * size:
        _write_maxima(dy, place, size, dx)
    else:
        _add_maxima(dy, place, size, stride, dx)


@kernel
def _write_maxima(dy: Array, place: Array, size: int, dx: Array) -> None:
    """Write ``dx`` once: each element is in exactly one window."""
    zero = dx.dtype.type(0)
    for n in range(dy.shape[0]):
        for i in range(dy.shape[1]):
            for down in range(size):
                line = dx[n, i * size + down]
                for j in range(dy.shape[2]):
                    gradient, source = dy[n, i, j], place[n, i, j]
                    for right in range(size):
                        target, k = line[j * size + right], np.uint8(down * size + right)
                        for c in range(dy.shape[3]):
                            target[c] = gradient[c] if source[c] == k else zero


@kernel
def _add_maxima(dy: Array, place: Array, size: int, stride: int, dx: Array) -> None:
    zero = dx.dtype.type(0)
    dx[:] = 0
    for n in range(dy.shape[0]):
        for i in range(dy.shape[1]):
            for down in range(size):
                line = dx[n, i * stride + down]
                for j in range(dy.shape[2]):
                    gradient, source = dy[n, i, j], place[n, i, j]
                    for right in range(size):
                        target, k = line[j * stride + right], down * size + right
                        for c in range(dy.shape[3]):
                            target[c] += gradient[c] if source[c] == k else zero


@kernel
def average_pool(x: Array, size: int, stride: int, y: Array) -> None:
    batch, height, width, channels = y.shape
    share = y.dtype.type(1 / (size * size))
    y[:] = 0
    for n in range(batch):
        for i in range(height):
            for j in range(width):
                for k in range(size * size):
                    window = x[n, i * stride + k // size, j * stride + k % size]
                    for c in range(channels):
                        y[n, i, j, c] += window[c]
                for c in range(channels):
                    y[n, i, j, c] *= share


@kernel
def average_pool_backward(dy: Array, size: int, stride: int, dx: Array) -> None:
    batch, height, width, channels = dy.shape
    share = dx.dtype.type(1 / (size * size))
    dx[:] = 0
    for n in range(batch):
        for i in range(height):
            for j in range(width):
                for k in range(size * size):
                    window = dx[n, i * stride + k // size, j * stride + k % size]
                    for c in range(channels):
                        window[c] += dy[n, i, j, c] * share
