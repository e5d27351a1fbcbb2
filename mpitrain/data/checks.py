"""Checks of examples and labels before a model computes on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.layout import Array
from ..errors import DataError
from .split import Split


def check_examples(
    name: str,
    split: Split,
    dtype: np.dtype[Any] | None,
    classes: int | None,
    examples: Array,
    labels: Array,
    first: int | Array = 0,
) -> None:
    """Check examples in stored form and their labels; see ``check_labels`` and ``check_conversion``."""
    check_labels(split, labels, first, classes)
    check_conversion(name, split, dtype, examples, first)


def check_labels(split: Split, labels: Array, first: int | Array = 0, classes: int | None = None) -> None:
    """Check that labels are classes, if the number of classes is known.

    Args:
        first: Index of the first example, or the indices of all examples.
        classes: Number of classes that the model distinguishes; the split's number takes precedence.

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
    check_classes(split.source, labels, first, classes)


def check_classes(source: str, labels: Array, first: int | Array, classes: int) -> None:
    """Check that labels are in [0, classes).

    Raises:
        DataError: A label is not in this range; the message names the label, its example and ``source``.
    """
    wrong = np.argwhere((labels < 0) | (labels >= classes))
    if len(wrong):
        label, number = labels[tuple(wrong[0])], _index(first, int(wrong[0][0]))
        raise DataError(
            f"{source}: label {label} of example {number:,} is out of range: must be from 0 to {classes - 1}, "
            f"for {classes} classes; change the label, or the model's number of outputs"
        )


def check_conversion(
    name: str, split: Split, dtype: np.dtype[Any] | None, examples: Array, first: int | Array = 0
) -> None:
    """Check that integer examples of the split keep their values in ``dtype``.

    Args:
        name: Name of the split, such as ``training``.
        dtype: float32 or float64; None if examples are not converted.
        examples: Some of the split's examples, in stored form.
        first: Index of the first of these examples, or the indices of all of them.

    Raises:
        DataError: A value would be rounded; the message names the split, the example and the value.
    """
    if dtype is None or not split.has_integers or not examples.size:
        return
    wrong = np.argwhere(inexact(examples, dtype))
    if len(wrong):
        value, number = examples[tuple(wrong[0])], _index(first, int(wrong[0][0]))
        wider = "--dtype float64 or " if dtype == np.float32 else ""
        raise DataError(
            f"the {name} examples ({split.source}) cannot be converted to {dtype}: {value} of example {number:,} would "
            f"become {int(dtype.type(value))}; use {wider}a first layer that takes integers, such as nn.Embedding"
        )


def inexact(integers: Array, dtype: np.dtype[Any]) -> Array:
    """Return which integers a floating-point type does not represent."""
    bound = 2 ** (np.finfo(dtype).nmant + 1)  # all integers up to this bound are exact
    if np.iinfo(integers.dtype).max < bound or (-bound <= int(integers.min()) and int(integers.max()) <= bound):
        return np.zeros(integers.shape, bool)
    # A larger integer is exact if it is within the bound after its trailing zero bits are removed. The smallest int64
    # has no positive counterpart, but its ``abs``, converted to uint64, has the right value.
    size = np.abs(integers.astype(np.int64) if integers.dtype.kind == "i" else integers).astype(np.uint64)
    return size // np.maximum(size & (~size + np.uint64(1)), np.uint64(1)) > bound  # type: ignore[no-any-return]


def _index(first: int | Array, place: int) -> int:
    """Return the index of an example of a batch."""
    return int(first[place]) if isinstance(first, np.ndarray) else first + place
