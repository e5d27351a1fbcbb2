"""Kernels of ``nn.loss``.

Where the Numba kernels return the loss, or the loss and the number of correct predictions, these return an array.
Gradients, but not losses, are multiplied by ``scale``, shape (1,), float64, if given.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.layout import Array
from .grid import THREADS, Pair, begin, blocks, empty, int32, int64, kind, named, real, team_grid


def softmax_gradient(
    outputs: Array, labels: Array, weight: float, gradient: Array, scale: Array | None = None
) -> Array:
    rows, classes = outputs.shape
    arguments = (
        outputs,
        labels,
        kind(labels),
        int64(rows),
        int32(classes),
        real(outputs)(weight),
        _factor(scale),
        gradient,
    )
    return _loss_of_rows("softmax_gradient", outputs, arguments, 1, weight)


def softmax_evaluate(outputs: Array, labels: Array) -> Array:
    rows, classes = outputs.shape
    arguments = (outputs, labels, kind(labels), int64(rows), int32(classes))
    return _loss_of_rows("softmax_evaluate", outputs, arguments, 2, 1.0)


def sigmoid_gradient(
    outputs: Array, labels: Array, weight: float, gradient: Array, scale: Array | None = None
) -> Array:
    share = weight / outputs.shape[1]
    factor = real(outputs)(share)
    arguments = (outputs, labels, kind(labels), int64(outputs.size), factor, _factor(scale), gradient)
    return _loss_of_elements("sigmoid_gradient", outputs, arguments, share)


def sigmoid_evaluate(outputs: Array, labels: Array) -> Array:
    rows, columns = outputs.shape
    arguments = (outputs, labels, kind(labels), int64(rows), int32(columns))
    return _loss_of_rows("sigmoid_evaluate", outputs, arguments, 2, 1 / columns)


def square_gradient(outputs: Array, labels: Array, weight: float, gradient: Array, scale: Array | None = None) -> Array:
    share = weight / outputs.shape[1]
    slope = real(outputs)(2 * weight / outputs.shape[1])
    arguments = (outputs, labels, kind(labels), int64(outputs.size), slope, _factor(scale), gradient)
    return _loss_of_elements("square_gradient", outputs, arguments, share)


def square_evaluate(outputs: Array, labels: Array) -> Array:
    arguments = (outputs, labels, kind(labels), int64(outputs.size))
    return _loss_of_elements("square_evaluate", outputs, arguments, 1 / outputs.shape[1])


def _loss_of_rows(name: str, outputs: Array, arguments: tuple[Any, ...], width: int, scale: float) -> Array:
    grid, block = team_grid(outputs)
    return _loss(name, outputs, grid, block, arguments, width, scale)


def _loss_of_elements(name: str, outputs: Array, arguments: tuple[Any, ...], scale: float) -> Array:
    return _loss(name, outputs, (blocks(outputs.size, THREADS), 1), (THREADS, 1), arguments, 1, scale)


def _loss(
    name: str, outputs: Array, grid: Pair, block: Pair, arguments: tuple[Any, ...], width: int, scale: float
) -> Array:
    """Launch blocks that write ``width`` sums each, and a kernel that adds them and scales the first sum."""
    parts = empty((grid[0], width), np.float64)
    begin("loss", named(name, outputs), grid, block, (*arguments, parts))
    sums = empty((2,) if width == 2 else (), np.float64)
    begin("sum", "add_parts", (1, 1), (THREADS, 1), (parts, int32(grid[0]), int32(width), np.float64(scale), sums))
    return sums


def _factor(scale: Array | None) -> Array | np.uint64:
    return np.uint64(0) if scale is None else scale
