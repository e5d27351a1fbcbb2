"""Batches for PyTorch modules: their inputs and labels, and datasets as splits."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from ..core.layout import Array
from ..data.batch import Batch, BatchSource, ReadAhead
from ..data.split import SAMPLE, Examples, Split, from_arrays
from ..errors import DataError, JobError
from .data_workers import ProcessLoader
from .random_numbers import LOOP_STREAM, seed_all

LABEL_KEYS = ("labels", "label", "targets", "target")  # of examples that are dicts, the first one that exists
_SHARED = (torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
TORCH_DTYPES = {"f": torch.float32, "d": torch.float64}


class Inputs(NamedTuple):
    """The arguments of a module and of a loss for one batch."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    labels: Any

    def describe(self) -> str:
        """Return the shapes of the inputs and labels, for messages."""
        inputs = [*map(_shape, self.args), *(f"{name}={_shape(value)}" for name, value in self.kwargs.items())]
        return f"inputs {', '.join(inputs)} and labels {_shape(self.labels)}"


def inputs_of(batch: Batch, dtype: np.dtype[Any], device: Any = "cpu", takes_labels: bool = False) -> Inputs:
    """Return the arguments for a batch.

    A batch of a ``Split`` has one input and labels. If the dataset's examples are tuples, the last element is the label
    and the others are the module's positional arguments. If they are dicts, the label has one of the names
    ``LABEL_KEYS``, and the others are keyword arguments.

    Args:
        dtype: Type of the parameters; floating-point inputs and labels are converted to it.
        takes_labels: Whether the labels are arguments of the module, too.

    Raises:
        JobError: Examples are neither tuples nor dicts, or have no label.
    """
    if not isinstance(batch, CollatedBatch):
        examples, labels = (to_tensor(array, dtype, device) for array in (batch.examples, batch.labels))
        return Inputs((examples, labels) if takes_labels else (examples,), {}, labels)
    tree = converted(batch.examples, dtype, device)
    if takes_labels:
        if isinstance(tree, Mapping):
            return Inputs((), tree, next((tree[name] for name in LABEL_KEYS if name in tree), None))
        return Inputs(tree if isinstance(tree, (tuple, list)) else (tree,), {}, None)
    if isinstance(tree, Mapping):
        key = next((name for name in LABEL_KEYS if name in tree), None)
        if key is None:
            raise JobError(
                f"an example is a dict with {', '.join(map(str, tree))}: must have labels by one of the names "
                f"{', '.join(LABEL_KEYS)}"
            )
        return Inputs((), {name: value for name, value in tree.items() if name != key}, tree[key])
    if not isinstance(tree, (tuple, list)) or len(tree) < 2:
        raise JobError(
            f"an example is {_shape(tree)}: must be a tuple of inputs followed by the label, or a dict with labels"
        )
    return Inputs(tree[:-1], {}, tree[-1])


def arguments_of(batch: Batch, dtype: np.dtype[Any], device: Any = "cpu") -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the module's arguments for arrays without labels: one array, or a dict of keyword arguments."""
    if isinstance(batch.examples, Mapping):
        return (), {name: to_tensor(array, dtype, device) for name, array in batch.examples.items()}
    return (to_tensor(batch.examples, dtype, device),), {}


def to_tensor(array: Array, dtype: np.dtype[Any], device: Any = "cpu") -> Tensor:
    """Return a tensor of the parameters' type, or of int64 for integers; it may share the array's memory."""
    if array.dtype.kind in "iub":
        array = array.astype(np.int64, copy=False)
    elif array.dtype != dtype:
        array = array.astype(dtype)
    return torch.from_numpy(array).to(device)


def converted(tree: Any, dtype: np.dtype[Any], device: Any) -> Any:
    """Return a tree of tensors on the device, floating-point ones of type ``dtype``."""
    if isinstance(tree, Tensor):
        wanted = TORCH_DTYPES[dtype.char] if tree.is_floating_point() else tree.dtype
        return tree.to(device=device, dtype=wanted)
    return _map(lambda item: converted(item, dtype, device), tree)


@dataclass(slots=True)
class CollatedBatch(Batch):
    """A batch of a dataset: ``examples`` is a tree of tensors that includes the labels; ``labels`` is None."""

    size: int = 0

    @property
    def count(self) -> int:
        return self.size

    def part(self, start: int, stop: int) -> Batch:
        return CollatedBatch(_slice(self.examples, start, stop), None, self.position + start, stop - start)


class DatasetSplit(Split):
    """Any object with ``__len__`` and ``__getitem__``.

    Before a batch is loaded, the random numbers of Python, NumPy and torch are seeded with the run's seed and the
    batch's position, so that random transformations are the same when a run is resumed.

    Args:
        collate_fn: Makes a batch of a list of examples.
    """

    is_array = False

    def __init__(self, dataset: Examples, collate_fn: Callable[[list[Any]], Any] = default_collate) -> None:
        super().__init__(f"the dataset {type(dataset).__name__}", len(dataset), (), np.float32)
        if not self.count:
            raise DataError(f"{self.source} has no examples")
        self._dataset, self._collate_fn = dataset, collate_fn

    def read_batch(self, start: int, stop: int) -> Batch:
        return self.collate(np.arange(start, stop), 0, start)

    def sample_digest(self) -> str:
        digest = hashlib.sha256()
        count = min(SAMPLE, len(self))
        for index in range(count):
            _digest(self.collate(np.array([index * len(self) // count]), 0, 0).examples, digest)
        return digest.hexdigest()[:16]

    def own_loader(self, seed: int, read_ahead: ReadAhead = ReadAhead()) -> BatchSource:
        return ProcessLoader(self, seed, read_ahead) if read_ahead.workers else DatasetLoader(self, seed)

    def collate(self, indices: Array, seed: int, position: int) -> CollatedBatch:
        """Return the examples of these indices as a batch.

        Raises:
            DataError: The examples cannot be collated.
        """
        seed_all(seed, position)
        examples = self._fetch(indices.tolist())
        try:
            return CollatedBatch(self._collate_fn(examples), None, position, len(indices))
        except (KeyError, TypeError, RuntimeError) as error:
            raise DataError(f"examples of {self.source} cannot be collated: {' '.join(str(error).split())}") from error

    def _fetch(self, indices: list[int]) -> list[Any]:
        """Return some examples.

        Raises:
            DataError: The dataset raises an exception; names the example.
        """
        index: Any = indices
        try:
            if (fetch := getattr(self._dataset, "__getitems__", None)) is not None:
                return list(fetch(indices))
            examples = []
            for index in indices:
                examples.append(self._dataset[index])
            return examples
        except DataError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            name = f"example {index}" if isinstance(index, int) else f"one of the examples {index[:4]} ..."
            raise DataError(
                f"{name} of {self.source} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())} "
                f"({frame.filename}, line {frame.lineno})"
            ) from error


class DatasetLoader:
    """Makes the batches of a dataset, in this process; see ``data.BatchSource``."""

    def __init__(self, split: DatasetSplit, seed: int) -> None:
        self._split, self._seed = split, seed

    def __len__(self) -> int:
        return len(self._split)

    def batch(self, position: int, count: int) -> Batch:
        made = self._split.collate(self._split.order(position, count, self._seed), self._seed, position)
        seed_all(self._seed, position, LOOP_STREAM)
        return made

    def sequential(self, start: int, stop: int) -> Batch:
        return self._split.collate(np.arange(start, stop), self._seed, start)

    def close(self) -> None:
        """Do nothing."""


def as_split(given: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> Any:
    """Return a dataset as a split; return any other value unchanged.

    A ``TensorDataset`` of two tensors, inputs and labels, is shared by the ranks of a node, as arrays are.

    Args:
        collate_fn: Makes a batch of a list of examples of a dataset; None for torch's ``default_collate``.

    Raises:
        JobError: It is a ``DataLoader`` or an ``IterableDataset``, or a ``Split`` that has no examples to collate.
    """
    if collate_fn is not None and isinstance(given, Split):
        raise JobError("collate_fn is for datasets: the batches of a split of mpitrain.data are arrays")
    if isinstance(given, DataLoader):
        raise JobError(
            "the data is a DataLoader: pass its dataset; Job and trainer.loader have the size of the batches as an "
            "argument"
        )
    if isinstance(given, IterableDataset):
        raise JobError(f"{type(given).__name__} is an IterableDataset: must have __len__ and __getitem__")
    if isinstance(given, (Split, np.ndarray, Tensor, tuple, Mapping)):
        return given
    if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        return given
    if collate_fn is None and type(given) is TensorDataset and len(given.tensors) == 2:
        examples, labels = given.tensors
        on_cpu = all(each.device.type == "cpu" and not each.requires_grad for each in given.tensors)
        if on_cpu and all(each.dtype in _SHARED for each in given.tensors):
            return from_arrays(examples.numpy(), labels.numpy())
    return DatasetSplit(given, collate_fn or default_collate)


def as_tensors(batch: Batch, device: torch.device, pin: bool = False) -> Any:
    """Return a batch on a device, as torch's DataLoader does.

    Args:
        pin: Whether to copy to a GPU asynchronously, from page-locked memory.
    """
    pin = pin and device.type != "cpu"
    if isinstance(batch, CollatedBatch):
        return _moved(batch.examples, device, pin)
    return [_moved(torch.from_numpy(array), device, pin) for array in (batch.examples, batch.labels)]


def _moved(tree: Any, device: torch.device, pin: bool) -> Any:
    if isinstance(tree, Tensor):
        return tree.pin_memory().to(device, non_blocking=True) if pin else tree.to(device)
    if isinstance(tree, dict):
        return {name: _moved(item, device, pin) for name, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_moved(item, device, pin) for item in tree))
    return [_moved(item, device, pin) for item in tree] if isinstance(tree, (tuple, list)) else tree


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of a tree of dicts, tuples and lists with each leaf replaced by the function's result."""
    if isinstance(tree, Mapping):
        return {name: function(item) for name, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(function, tree))
    if isinstance(tree, (tuple, list)):
        return [function(item) for item in tree]
    return tree


def _slice(tree: Any, start: int, stop: int) -> Any:
    """Return the examples [start, stop) of a collated tree; strings are collated to lists."""
    if isinstance(tree, Tensor) or (isinstance(tree, list) and tree and isinstance(tree[0], (str, bytes))):
        return tree[start:stop]
    return _map(lambda item: _slice(item, start, stop), tree)


def _digest(tree: Any, digest: Any) -> None:
    if isinstance(tree, Tensor):
        digest.update(tree.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(tree, (Mapping, tuple, list)):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            _digest(item, digest)
    else:
        digest.update(repr(tree).encode())


def _shape(value: Any) -> str:
    """Return the shapes of a tree of tensors, as text."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shape(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_shape, value)) + ")"
    return type(value).__name__
