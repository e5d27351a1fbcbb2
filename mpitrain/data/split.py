"""A split: examples and labels in files, loaded only when they are read."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Protocol

import numpy as np

from ..core.layout import Array, Shape
from ..errors import DataError
from .batch import Batch, BatchSource, ReadAhead
from .permutation import order

SAMPLE = 16  # examples in a digest


class Examples(Protocol):
    """A map-style dataset, such as a ``torch.utils.data.Dataset``."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return an example."""


class Split:
    """Examples with labels, addressed by index.

    Subclasses implement ``read``; construction reads only headers.

    Attributes:
        source: Origin of the data, for messages.
        count: Number of examples, also ``len(split)``.
        shape: Shape of an example.
        dtype: Stored data type, in this machine's byte order.
        label_shape, label_dtype: Shape and data type of a label.
        classes: Number of classes; labels are integers in [0, classes). None if labels are not classes.
        scale: Factor applied to examples when a batch is made; not to integers that the model takes unchanged.
        block: Number of consecutive examples to read at a time; None if the file cannot be read in ranges.
        note: A note to the user about how the files are read, or None.
        is_array: Whether all examples have the shape and type above, so that a batch is an array.
        shuffle: Whether the examples are in another order in each epoch; else in the order of their indices.

    Raises:
        DataError: Examples or labels are not numbers.
    """

    note: str | None = None
    is_array = True
    shuffle = True

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
        """Size of all examples and labels in bytes."""
        example = math.prod(self.shape) * self.dtype.itemsize
        label = math.prod(self.label_shape) * self.label_dtype.itemsize
        return self.count * (example + label)

    @property
    def has_integers(self) -> bool:
        """Whether the stored examples are integers."""
        return self.dtype.kind in "iu"

    def read(self, start: int, stop: int, examples: Array, labels: Array) -> None:
        """Read the examples [start, stop) and their labels into arrays.

        Args:
            examples: Shape ``(stop - start, *shape)``, of ``dtype``, C-contiguous.
            labels: Shape ``(stop - start, *label_shape)``, of ``label_dtype``, C-contiguous.

        Raises:
            DataError: The files do not match their headers.
        """
        raise NotImplementedError

    def read_batch(self, start: int, stop: int) -> Batch:
        """Return the examples [start, stop) in stored form.

        Raises:
            DataError: The files do not match their headers.
        """
        examples = np.empty((stop - start, *self.shape), self.dtype)
        labels = np.empty((stop - start, *self.label_shape), self.label_dtype)
        self.read(start, stop, examples, labels)
        return Batch(examples, labels, start)

    def sample_digest(self) -> str:
        """Return a digest of some examples and labels, spread over the split; of the first ones if it has no ranges.

        Raises:
            DataError: The files do not match their headers.
        """
        digest = hashlib.sha256()
        spread = self.block is not None or isinstance(self, ArraySplit)
        for index in range(min(SAMPLE, len(self))):
            start = index * len(self) // min(SAMPLE, len(self)) if spread else index
            batch = self.read_batch(start, start + 1)
            digest.update(batch.examples.tobytes() + batch.labels.tobytes())
        return digest.hexdigest()[:16]

    def order(self, position: int, count: int, seed: int) -> Array:
        """Return the indices of the examples at [position, position + count) of the endless stream.

        Every example occurs once in each epoch, that is in each range of ``len(self)`` positions that starts at a
        multiple of ``len(self)``; in an order determined by ``seed``, if ``shuffle`` is True.

        Raises:
            DataError: There are fewer examples than ``count``.
        """
        if count > len(self):
            raise DataError(
                f"a batch of {count:,} examples is larger than {self.source}, which has {len(self):,}; reduce the "
                "batch size"
            )
        if not self.shuffle:
            return np.arange(position, position + count) % len(self)
        return order(position, count, len(self), seed, self.block)

    def own_loader(self, seed: int, read_ahead: ReadAhead = ReadAhead()) -> BatchSource | None:
        """Return what makes the batches of this split, in an order determined by ``seed``; None for a ``Loader``."""
        return None


class DescribedSplit(Split):
    """A split of which only these facts are known; on ranks that read no examples."""

    def __init__(self, count: int, shape: Shape, digest: str) -> None:
        super().__init__("the training examples", count, shape, np.float32)
        self._digest = digest

    def sample_digest(self) -> str:
        return self._digest


def _native(source: str, dtype: Any) -> np.dtype[Any]:
    """Return ``dtype`` in this machine's byte order, the only one that kernels support."""
    dtype = np.dtype(dtype)
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or dtype == np.float16:
        raise DataError(f"{source} has values of type {dtype}: must be integers, float32 or float64")
    native: np.dtype[Any] = dtype.newbyteorder("=")
    return native


class ArraySplit(Split):
    """Examples in arrays in memory."""

    def __init__(self, examples: Array, labels: Array, classes: int | None, scale: float) -> None:
        super().__init__(
            "arrays", len(examples), examples.shape[1:], examples.dtype, labels.shape[1:], labels.dtype, classes, scale
        )
        self._examples, self._labels = examples, labels

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
    examples, labels = np.asarray(examples), np.asarray(labels)
    if examples.ndim == 0 or len(examples) == 0:
        raise DataError(f"from_arrays got examples of shape {examples.shape}: must have at least one example")
    if labels.ndim == 0 or len(labels) != len(examples):
        count = 0 if labels.ndim == 0 else len(labels)
        raise DataError(f"from_arrays got {len(examples):,} examples but {count:,} labels; lengths must match")
    return ArraySplit(examples, labels, classes, scale)


def check_examples(
    name: str,
    split: Split,
    dtype: np.dtype[Any] | None,
    classes: int | None,
    examples: Array,
    labels: Array,
    first: int = 0,
) -> None:
    """Check examples in stored form and their labels; see ``check_labels`` and ``check_conversion``."""
    check_labels(split, labels, first, classes)
    check_conversion(name, split, dtype, examples, first)


def check_labels(split: Split, labels: Array, first: int = 0, classes: int | None = None) -> None:
    """Check that labels are classes.

    Args:
        first: Index of the first label's example.
        classes: Number of classes that the model distinguishes; the split's own number has precedence.

    Raises:
        DataError: A label is not a class; the message names it and the file.
    """
    classes = classes if split.classes is None else split.classes
    if classes is None:
        return
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"{split.source}: labels are of type {labels.dtype}, but class labels must be integers; "
            "convert them with labels.astype(int)"
        )
    wrong = np.argwhere((labels < 0) | (labels >= classes))
    if len(wrong):
        label, number = labels[tuple(wrong[0])], first + int(wrong[0][0])
        raise DataError(
            f"{split.source}: label {label} of example {number:,} is out of range: must be from 0 to {classes - 1}, "
            f"for {classes} classes; change the label, or the model's number of outputs"
        )


def check_conversion(name: str, split: Split, dtype: np.dtype[Any] | None, examples: Array, first: int = 0) -> None:
    """Check that integer examples of the split keep their values in ``dtype``.

    Args:
        name: Name of the split, such as ``training``.
        dtype: float32 or float64; None if examples are not converted.
        examples: Some of the split's examples, in stored form.
        first: Index of the first one.

    Raises:
        DataError: A value would be rounded; the message names the split, the example and the value.
    """
    if dtype is None or not split.has_integers or not examples.size:
        return
    bound = 2 ** (np.finfo(dtype).nmant + 1)  # all integers up to here are exact
    if np.iinfo(split.dtype).max < bound or (-bound <= int(examples.min()) and int(examples.max()) <= bound):
        return
    # A larger one is exact if its digits fit without the zero bits at the end. The smallest int64 has no positive
    # counterpart, but becomes it as a uint64.
    size = np.abs(examples.astype(np.int64) if examples.dtype.kind == "i" else examples).astype(np.uint64)
    wrong = np.argwhere(size // np.maximum(size & (~size + np.uint64(1)), np.uint64(1)) > bound)
    if len(wrong):
        value, number = examples[tuple(wrong[0])], first + int(wrong[0][0])
        wider = "--dtype float64 or " if dtype == np.float32 else ""
        raise DataError(
            f"the {name} examples ({split.source}) cannot be converted to {dtype}: {value} of example {number:,} would "
            f"become {int(dtype.type(value))}; use {wider}a first layer that takes integers, such as nn.Embedding"
        )
