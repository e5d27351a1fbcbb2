"""A split: examples and labels in files, of which nothing is loaded until it is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.layout import Array, Shape
from ..errors import DataError


class Split:
    """Examples with labels, by number.

    A subclass reads them; construction reads no more than headers.

    Attributes:
        source: Where they come from, for messages.
        count: Number of examples, also ``len(split)``.
        shape: Shape of an example.
        dtype: As it is stored, in this machine's byte order.
        label_shape, label_dtype: Of a label.
        classes: Labels are integers in [0, classes); None where they are something else.
        scale: Examples are multiplied by this when a batch is made.
        block: Examples that lie together in the file, where slices can be read from it without reading all of
            it; None where they cannot.
        note: What the user should be told of how the files are read, or None.

    Raises:
        DataError: Examples or labels are not numbers.
    """

    note: str | None = None

    def __init__(
        self,
        source: str,
        count: int,
        shape: Shape,
        dtype: Any,
        label_shape: Shape = (),
        label_dtype: Any = np.int64,
        classes: int | None = None,
        scale: float = 1.0,
        block: int | None = None,
    ) -> None:
        self.source, self.count, self.shape, self.dtype = source, count, tuple(shape), _native(source, dtype)
        self.label_shape, self.label_dtype = tuple(label_shape), _native(source, label_dtype)
        self.classes, self.scale, self.block = classes, scale, block

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        """Bytes of all examples and labels."""
        example = math.prod(self.shape) * self.dtype.itemsize
        label = math.prod(self.label_shape) * self.label_dtype.itemsize
        return self.count * (example + label)

    def read(self, start: int, stop: int, examples: Array, labels: Array) -> None:
        """Fill arrays with the examples numbered [start, stop) and their labels.

        Args:
            examples: Shape (stop - start, *shape), of ``dtype``, C-contiguous.
            labels: Shape (stop - start, *label_shape), of ``label_dtype``, C-contiguous.

        Raises:
            DataError: The files do not hold what their headers say.
        """
        raise NotImplementedError


def _native(source: str, dtype: Any) -> np.dtype[Any]:
    """``dtype`` in this machine's byte order, the only one that kernels take."""
    dtype = np.dtype(dtype)
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or dtype == np.float16:
        raise DataError(f"{source} holds values of type {dtype}: give integers, float32 or float64")
    native: np.dtype[Any] = dtype.newbyteorder("=")
    return native


class ArraySplit(Split):
    """Examples that are in memory already."""

    def __init__(self, examples: Array, labels: Array, classes: int | None, scale: float) -> None:
        super().__init__(
            "arrays",
            len(examples),
            examples.shape[1:],
            examples.dtype,
            labels.shape[1:],
            labels.dtype,
            classes,
            scale,
        )
        self._examples, self._labels = examples, labels

    def read(self, start: int, stop: int, examples: Array, labels: Array) -> None:
        examples[...] = self._examples[start:stop]
        labels[...] = self._labels[start:stop]


def from_arrays(examples: Array, labels: Array, classes: int | None = None, scale: float = 1.0) -> Split:
    """A split of arrays in memory; every rank must give the same.

    Args:
        examples: Shape (n, ...).
        labels: Shape (n, ...).
        classes: Where labels are classes: how many there are.
        scale: Factor on the examples.

    Raises:
        DataError: There are no examples, or not one label for each.
    """
    examples, labels = np.asarray(examples), np.asarray(labels)
    if examples.ndim == 0 or len(examples) == 0:
        raise DataError("from_arrays was given no examples")
    if labels.ndim == 0 or len(labels) != len(examples):
        count = 0 if labels.ndim == 0 else len(labels)
        raise DataError(f"from_arrays was given {len(examples):,} examples, {count:,} labels: give one for each")
    return ArraySplit(examples, labels, classes, scale)


def check_labels(split: Split, labels: Array, first: int = 0) -> None:
    """Make sure that labels are classes of the split; ``first`` is the number of the first label's example.

    Raises:
        DataError: One is not; the message names it and the file.
    """
    if split.classes is None:
        return
    if labels.dtype.kind not in "iu":
        raise DataError(f"{split.source}: labels are {labels.dtype}, and must be integers to be classes")
    wrong = np.argwhere((labels < 0) | (labels >= split.classes))
    if len(wrong):
        label, number = labels[tuple(wrong[0])], first + int(wrong[0][0])
        last = split.classes - 1
        raise DataError(f"{split.source}: label {label} of example {number:,} is none of the classes 0 to {last}")
