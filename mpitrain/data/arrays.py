"""Examples in arrays in memory."""

from __future__ import annotations

import numpy as np

from ..core.layout import Array
from ..errors import DataError
from .split import Split


class ArraySplit(Split):
    """Examples in arrays in memory."""

    def __init__(self, examples: Array, labels: Array, classes: int | None, scale: float) -> None:
        super().__init__(
            "arrays",
            len(examples),
            examples.shape[1:],
            examples.dtype,
            label_shape=labels.shape[1:],
            label_dtype=labels.dtype,
            classes=classes,
            scale=scale,
        )
        self._examples, self._labels = examples, labels

    @property
    def has_ranges(self) -> bool:
        return True

    def read(self, start: int, stop: int, examples: Array, labels: Array) -> None:
        examples[...] = self._examples[start:stop]
        labels[...] = self._labels[start:stop]


def from_arrays(examples: Array, labels: Array, classes: int | None = None, scale: float = 1.0) -> Split:
    """Return a split of arrays in memory; all ranks must pass the same arrays.

    Args:
        examples: Shape (n, ...).
        labels: Shape (n, ...).
        classes: Number of classes if labels are classes, else None.
        scale: Factor applied to the examples.

    Raises:
        DataError: There are no examples, or the number of labels differs.
    """
    for name, array in (("examples", examples), ("labels", labels)):
        if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
            raise DataError(f"from_arrays got {name} with masked values: fill them, or drop these examples")
    examples, labels = np.asarray(examples), np.asarray(labels)
    if examples.ndim == 0 or len(examples) == 0:
        raise DataError(f"from_arrays got examples of shape {examples.shape}: must have at least one example")
    if labels.ndim == 0 or len(labels) != len(examples):
        count = 0 if labels.ndim == 0 else len(labels)
        raise DataError(f"from_arrays got {len(examples):,} examples but {count:,} labels; lengths must match")
    return ArraySplit(examples, labels, classes, scale)
