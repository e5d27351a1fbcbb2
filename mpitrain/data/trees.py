"""Examples and batches that are nested tuples, lists and dicts of arrays, tensors or numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.layout import Array, Shape

_SCALARS = (bool, int, float, str, bytes)
Allocate = Callable[[Shape, Any], Array]  # takes a shape and a data type


def map_children(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of a tuple, list or dict with the function's result for each child; a leaf is unchanged."""
    if isinstance(tree, Mapping):
        return {name: function(item) for name, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(function, tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(function, tree))
    return tree


def leaves(tree: Any) -> list[Any]:
    """Return the arrays, tensors, numbers and strings of a tree in order."""
    if isinstance(tree, Mapping):
        return [leaf for item in tree.values() for leaf in leaves(item)]
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def part_of(tree: Any, start: int, stop: int) -> Any:
    """Return the examples [start, stop) of a batch; strings are collated to lists."""
    is_list_of_strings = isinstance(tree, list) and tree and isinstance(tree[0], (str, bytes))
    if is_list_of_strings or hasattr(tree, "shape"):
        return tree[start:stop]
    return map_children(lambda item: part_of(item, start, stop), tree)


def stack(examples: Sequence[Any], allocate: Allocate = np.empty) -> Any:
    """Return a batch: arrays with one dimension more, in the same tuples and dicts; strings become a list.

    Args:
        allocate: Returns an array for a part of the batch.

    Raises:
        TypeError, ValueError: The examples differ in structure, kind or shape.
    """
    batch = Stacked(examples[0], len(examples), allocate)
    for place, example in enumerate(examples):
        check_alike(examples[0], example)
        batch.set(place, example)
    return batch.tree()


class Stacked:
    """A batch to which each loaded example is copied at once, while the example is in the processor's cache.

    Args:
        first: The first example.
        count: Number of examples.
        allocate: See ``stack``.
    """

    def __init__(self, first: Any, count: int, allocate: Allocate) -> None:
        self._allocate = allocate
        self._parts: Any = None  # parts of a tuple or dict
        self._batch: Any = None  # a list of strings, or an array
        if isinstance(first, (tuple, Mapping)):
            self._parts = map_children(lambda item: Stacked(item, count, allocate), first)
        elif isinstance(first, (str, bytes)):
            self._batch = [first] * count
        else:
            example = np.asarray(first)
            self._batch = self._array((count, *example.shape), example.dtype, first)

    def set(self, place: int, example: Any) -> None:
        """Copy an example to a place; examples must be copied in the order of their places.

        Raises:
            ValueError: The example differs from the first one in shape.
        """
        if isinstance(self._parts, dict):
            for name, part in self._parts.items():
                part.set(place, example[name])
        elif self._parts is not None:
            for part, item in zip(self._parts, example, strict=True):
                part.set(place, item)
        elif isinstance(self._batch, list):
            self._batch[place] = example
        else:
            self._set_array(place, np.asarray(example), example)

    def tree(self) -> Any:
        """Return the batch."""
        return self._batch if self._parts is None else map_children(Stacked.tree, self._parts)

    def _set_array(self, place: int, example: Array, element: Any) -> None:
        batch = self._batch
        if example.shape != batch.shape[1:]:
            raise ValueError(f"some examples have shape {batch.shape[1:]}, others {example.shape}")
        if example.dtype != batch.dtype and (dtype := np.result_type(batch, example)) != batch.dtype:
            if dtype.kind not in (example.dtype.kind, "i"):
                raise TypeError(f"{batch.dtype} and {example.dtype} have no common type that keeps all values")
            self._batch = self._array(batch.shape, dtype, element)
            self._batch[:place] = batch[:place]
        self._batch[place] = example

    def _array(self, shape: Shape, dtype: np.dtype[Any], element: Any) -> Array:
        if dtype.kind == "S" and isinstance(element, list):
            raise TypeError("an element is a list of bytes, which has no form as an array: convert it with map")
        if dtype.hasobject:
            raise TypeError(
                f"an element is of type {type(element).__name__}, must be an array, a tensor, a number or a text"
            )
        return self._allocate(shape, dtype)


def check_alike(first: Any, other: Any) -> None:
    """Check that two examples have the same structure, and values of the same kinds; shapes and widths may differ.

    Raises:
        TypeError: The structure or a kind differs.
    """
    same_type = type(first) is type(other)
    if same_type and (type(first) in _SCALARS or (type(first) is np.ndarray and first.dtype == other.dtype)):
        return
    if isinstance(first, Mapping):
        alike = isinstance(other, Mapping) and first.keys() == other.keys()
        if alike:
            for name, item in first.items():
                check_alike(item, other[name])
    elif isinstance(first, tuple):
        alike = isinstance(other, tuple) and len(first) == len(other)
        if alike:
            for item, counterpart in zip(first, other, strict=True):
                check_alike(item, counterpart)
    elif isinstance(first, list):
        alike = isinstance(other, list)
        if alike and len({*map(type, first), *map(type, other)} - {float} | {int}) > 1:
            for item in (*first, *other):
                check_alike(first[0] if first else other[0], item)
    else:
        alike = _kind(first) == _kind(other)
    if not alike:
        raise TypeError("the examples differ")


def _kind(leaf: Any) -> object:
    """Return the kind of an array, a tensor, a number or a text, such as ``i`` for integers of any width."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError("an element is a masked array: fill its missing values")
    if isinstance(leaf, (str, bytes)):
        return str if isinstance(leaf, str) else bytes
    if isinstance(leaf, (np.generic, np.ndarray)):
        return "i" if leaf.dtype.kind == "u" else leaf.dtype.kind
    if hasattr(leaf, "is_floating_point"):  # a tensor
        return "f" if leaf.is_floating_point() else "b" if str(leaf.dtype) == "torch.bool" else "i"
    return next((kind for base, kind in ((bool, "b"), (int, "i"), (float, "f")) if isinstance(leaf, base)), type(leaf))


def describe(tree: Any) -> str:
    """Return the types and shapes of a tree, as text."""
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{name}: {describe(item)}" for name, item in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        parts = ", ".join(map(describe, tree))
        return f"({parts})" if isinstance(tree, tuple) else f"[{parts}]"
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return f"{str(tree.dtype).removeprefix('torch.')}{tuple(tree.shape)}"
    return type(tree).__name__
