"""Examples and batches that are nested tuples, lists and dicts of arrays, tensors or numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.layout import Array


def map_children(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of a tuple, list or dict with each child replaced by the function's result; a leaf as it is."""
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


def stack(examples: Sequence[Any]) -> Any:
    """Return a batch of examples: arrays with one dimension more, in the same tuples and dicts; strings are a list.

    Raises:
        KeyError, TypeError, ValueError: The examples differ in structure or shape.
    """
    first = examples[0]
    if isinstance(first, Mapping):
        return {name: stack([example[name] for example in examples]) for name in first}
    if isinstance(first, tuple):
        if any(not isinstance(example, tuple) for example in examples):
            raise TypeError("some examples are tuples, others are not")
        columns = [stack(column) for column in zip(*examples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, (str, bytes)):
        return list(examples)
    batch: Array = np.stack([np.asarray(example) for example in examples])
    if batch.dtype.hasobject:
        raise TypeError(f"an element is of type {type(first).__name__}, which no array can hold")
    return batch


def describe(tree: Any) -> str:
    """Return the types and shapes of a tree, as text."""
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{name}: {describe(item)}" for name, item in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        return "(" + ", ".join(map(describe, tree)) + ")"
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return f"{str(tree.dtype).removeprefix('torch.')}{tuple(tree.shape)}"
    return type(tree).__name__
