"""Windows of a long sequence, such as a text or a time series."""

from __future__ import annotations

import numpy as np

from ..core.layout import Array
from ..errors import DataError
from .split import DatasetSplit


class Windows:
    """Windows of an array and the same windows some elements later, as views."""

    def __init__(self, array: Array, length: int, stride: int, ahead: int) -> None:
        self._array, self._length, self._stride, self._ahead = array, length, stride, ahead

    def __len__(self) -> int:
        return max(0, (len(self._array) - self._ahead - self._length) // self._stride + 1)

    def __getitem__(self, index: int) -> tuple[Array, Array] | Array:
        start = index * self._stride
        window: Array = self._array[start : start + self._length]
        if not self._ahead:
            return window
        return window, self._array[start + self._ahead : start + self._ahead + self._length]


def windows(array: Array, length: int, stride: int | None = None, ahead: int = 1) -> DatasetSplit:
    """Return a split of the windows of a sequence.

    The split needs no memory besides the sequence, which may be memory-mapped. An example is ``(window, later)``, where
    ``later`` is the window ``ahead`` elements later: for a language model the next token at each place. For labels of
    another kind, use ``map``.

    Args:
        array: Shape (n, ...).
        length: Elements of a window.
        stride: Elements from one window to the next; by default ``length``, so that windows do not overlap.
        ahead: Elements from a window to its labels; 0 for windows without labels.

    Raises:
        DataError: A number is out of range, or the sequence is shorter than a window and its labels.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise DataError("windows got a masked array: fill its missing values")
    array, stride = np.asanyarray(array), length if stride is None else stride
    if length < 1 or stride < 1 or ahead < 0:
        raise DataError(f"windows got length={length}, stride={stride}, ahead={ahead}: must be at least 1, 1 and 0")
    made = Windows(array, length, stride, ahead)
    if array.ndim == 0 or len(made) == 0:
        raise DataError(f"windows got an array of shape {array.shape}: must have at least {length + ahead} elements")
    return DatasetSplit(made, f"windows of {length} elements")
