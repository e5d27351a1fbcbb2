"""Windows of images as rows of a matrix."""

from __future__ import annotations

from ..kernels import kernel
from ..layout import Array

# The innermost loops run along one row of a window, whose channels are contiguous both in the image and in the matrix.
# They index views that start there: Numba assumes that an index computed from several variables may be negative, and
# would not vectorize the loop.


@kernel
def copy_windows(x: Array, start: int, down: int, right: int, height: int, width: int, windows: Array) -> None:
    """Copy windows of images ``x``, shape (batch, rows, columns, channels), to ``windows[n, i, j, :size]``.

    ``windows[n, i, j]`` has its corner at ``x[n, (start + i) * down, j * right]``; elements beyond its size, height *
    width * channels, are not changed.
    """
    channels = x.shape[3]
    run = width * channels
    lines = x.reshape((x.shape[0], x.shape[1], x.shape[2] * channels))
    for n in range(windows.shape[0]):
        for i in range(windows.shape[1]):
            for k in range(height):
                line = lines[n, (start + i) * down + k]
                for j in range(windows.shape[2]):
                    source, target = line[j * right * channels :], windows[n, i, j, k * run :]
                    for c in range(run):
                        target[c] = source[c]


@kernel
def add_windows(windows: Array, start: int, down: int, right: int, height: int, width: int, x: Array) -> None:
    """Add windows to the elements of ``x`` from which ``copy_windows`` copies them."""
    channels = x.shape[3]
    run = width * channels
    lines = x.reshape((x.shape[0], x.shape[1], x.shape[2] * channels))
    for n in range(windows.shape[0]):
        for i in range(windows.shape[1]):
            for k in range(height):
                line = lines[n, (start + i) * down + k]
                for j in range(windows.shape[2]):
                    target, source = line[j * right * channels :], windows[n, i, j, k * run :]
                    for c in range(run):
                        target[c] += source[c]
