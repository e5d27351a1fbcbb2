"""Batches for PyTorch modules, their inputs and labels; and datasets as splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from ..core.layout import Array
from ..data.arrays import from_arrays
from ..data.batch import Batch, CollatedBatch
from ..data.split import DatasetSplit, Split
from ..data.streams import StreamSplit
from ..data.trees import check_alike, describe, leaves, map_children, stack
from ..errors import DataError, JobError

# Names of the label in examples that are dicts; the first that exists is used.
LABEL_KEYS = ("labels", "label", "targets", "target")
_INDEXABLE = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")  # by torch's index_select
_SHARED = (torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
TORCH_DTYPES = {"f": torch.float32, "d": torch.float64}


class Inputs(NamedTuple):
    """The arguments of a module and of a loss for one batch."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    labels: Any

    def describe(self) -> str:
        """Return the shapes of the inputs and labels, for messages."""
        inputs = [*map(describe, self.args), *(f"{name}={describe(value)}" for name, value in self.kwargs.items())]
        return f"inputs {', '.join(inputs)} and labels {describe(self.labels)}"


def inputs_of(batch: Batch, dtype: np.dtype[Any], device: Any = "cpu", takes_labels: bool = False) -> Inputs:
    """Return the arguments for a batch.

    A batch of arrays has one input and labels. If the dataset's examples are tuples, the last element is the label, and
    the other elements are the module's positional arguments. If the examples are dicts, the label has one of the names
    ``LABEL_KEYS``, and the other items are keyword arguments.

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
            f"an example is {describe(tree)}: must be a tuple of inputs followed by the label, or a dict with labels"
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
        if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
            raise DataError(f"the integer {array.max()} is too large for torch's int64: must be at most 2**63 - 1")
        array = array.astype(np.int64, copy=False)
    elif array.dtype != dtype:
        array = array.astype(dtype)
    return torch.from_numpy(array).to(device)


def converted(tree: Any, dtype: np.dtype[Any], device: Any) -> Any:
    """Return a tree with its tensors on the device, floating-point tensors converted to ``dtype``."""
    if isinstance(tree, Tensor):
        wanted = TORCH_DTYPES[dtype.char] if tree.is_floating_point() else tree.dtype
        return tree.to(device=device, dtype=wanted)
    return map_children(lambda item: converted(item, dtype, device), tree)


class DatasetOnDevice:
    """Training data in the memory of a device, where batches of it are made.

    Args:
        examples, labels: As stored, shape (n, ...) each.
        scale: Factor of the examples; None if they are integers such as indices.
        dtype: Type of the flat vectors.
        is_bfloat16: Whether floating-point inputs and labels become bfloat16.
    """

    def __init__(
        self, examples: Array, labels: Array, scale: float | None, dtype: np.dtype[Any], is_bfloat16: bool, device: Any
    ) -> None:
        self._tensors = [torch.from_numpy(array).to(device, copy=True) for array in (examples, labels)]
        self._scale, self._dtype = scale, TORCH_DTYPES[dtype.char]
        self._input_dtype = torch.bfloat16 if is_bfloat16 else self._dtype

    @staticmethod
    def supports(*arrays: Array) -> bool:
        """Return whether batches of these arrays can be made on a device."""
        return all(array.dtype.name in _INDEXABLE for array in arrays)

    def inputs_of(self, indices: Tensor, takes_labels: bool) -> Inputs:
        """Return the arguments for the examples with these indices; see ``inputs_of``."""
        examples, labels = (tensor.index_select(0, indices) for tensor in self._tensors)
        if self._scale is not None:
            examples = examples.to(self._dtype)
            if self._scale != 1:
                examples = examples.mul_(self._scale)
        examples, labels = self._converted(examples), self._converted(labels)
        return Inputs((examples, labels) if takes_labels else (examples,), {}, labels)

    def labels_of(self, indices: Tensor) -> Tensor:
        """Return the labels with these indices, as stored."""
        return self._tensors[1].index_select(0, indices)

    def _converted(self, tensor: Tensor) -> Tensor:
        """Convert floats to the parameters' type and integers to int64, as ``to_tensor`` does."""
        return tensor.to(self._input_dtype if tensor.is_floating_point() else torch.int64)


class TensorBatch(CollatedBatch):
    """A batch of tensors. It is pickled as arrays, which pass between processes without a copy."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (_as_arrays(self.examples), self.position, self.size)


@dataclass(slots=True)
class _Packed:
    """The bytes of a tensor."""

    array: Array
    dtype: torch.dtype
    shape: torch.Size


def _as_arrays(tree: Any) -> Any:
    if isinstance(tree, Tensor) and tree.layout == torch.strided and tree.device.type == "cpu":
        return _Packed(tree.detach().contiguous().view(-1).view(torch.uint8).numpy(), tree.dtype, tree.shape)
    return tree if isinstance(tree, Tensor) else map_children(_as_arrays, tree)


def _as_tensors(tree: Any) -> Any:
    if isinstance(tree, _Packed):
        return torch.from_numpy(tree.array).view(tree.dtype).view(tree.shape)
    return map_children(_as_tensors, tree)


def _unpickled(tree: Any, position: int, size: int) -> TensorBatch:
    return TensorBatch(_as_tensors(tree), None, position, size)


class _OneByOne:
    """A ``Subset`` without its ``__getitems__``, so that each example has its own random numbers."""

    def __init__(self, subset: Subset[Any]) -> None:
        self._subset = subset

    def __len__(self) -> int:
        return len(self._subset)

    def __getitem__(self, index: int) -> Any:
        return self._subset[index]


def _collate(examples: Any) -> Any:
    """Return a batch of tensors, made by torch's ``default_collate``."""
    for example in examples:
        check_alike(examples[0], example)  # default_collate takes the keys and types of the first example
    if any(isinstance(leaf, np.integer) for leaf in leaves(examples[0])):
        examples = [_with_python_integers(example) for example in examples]
    return default_collate(examples)


def _with_python_integers(tree: Any) -> Any:
    """Return an example whose integers without dimensions become int64, as torch's losses and indices need them."""
    return int(tree) if isinstance(tree, np.integer) else map_children(_with_python_integers, tree)


def as_split(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> Any:
    """Return a dataset as a split; return any other value unchanged.

    A ``TensorDataset`` of two CPU tensors, inputs and labels, is shared by the ranks of a node, like arrays.

    Args:
        collate_fn: Makes a batch from a list of examples of a dataset; None for torch's ``default_collate``.

    Raises:
        JobError: The dataset is a ``DataLoader`` or a stream without a length, or ``collate_fn`` is given for a split
            of arrays.
    """
    if collate_fn is not None and isinstance(dataset, Split) and not isinstance(dataset, DatasetSplit):
        raise JobError(
            "collate_fn has no effect on a split of mpitrain.data, whose batches are arrays; remove it, or pass a "
            "torch dataset"
        )
    if isinstance(dataset, DataLoader):
        raise JobError(
            "the data is a DataLoader: pass its dataset, and the batch size as an argument of Job or trainer.loader"
        )
    if isinstance(dataset, IterableDataset):
        name = type(dataset).__name__
        if not hasattr(dataset, "__len__"):
            raise JobError(
                f"{name} is a stream without a length: pass data.stream(dataset, length=...), "
                f"where length is the number of examples per epoch"
            )
        dataset = StreamSplit(dataset, len(dataset))
    if isinstance(dataset, DatasetSplit):
        own = None if dataset.collate is stack else dataset.collate
        return dataset.collated(collate_fn or own or _collate, TensorBatch)
    if isinstance(dataset, (Split, np.ndarray, Tensor, tuple, Mapping)):
        return dataset
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return dataset
    if collate_fn is None and _is_arrays(dataset):
        return from_arrays(*(tensor.numpy() for tensor in dataset.tensors))
    source = f"the dataset {type(dataset).__name__}"
    return DatasetSplit(_OneByOne(dataset) if type(dataset) is Subset else dataset, source).collated(
        collate_fn or _collate, TensorBatch
    )


def _is_arrays(dataset: Any) -> bool:
    """Return whether a dataset consists of inputs and labels that NumPy arrays can share."""
    return (
        type(dataset) is TensorDataset
        and len(dataset.tensors) == 2
        and all(
            tensor.device.type == "cpu" and not tensor.requires_grad and tensor.dtype in _SHARED
            for tensor in dataset.tensors
        )
    )


def as_tensors(batch: Batch, device: torch.device, pin: bool = False) -> Any:
    """Return a batch on a device, in the form in which torch's DataLoader returns it.

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
    if isinstance(tree, Mapping):
        return {name: _moved(item, device, pin) for name, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_moved(item, device, pin) for item in tree))
    return [_moved(item, device, pin) for item in tree] if isinstance(tree, (tuple, list)) else tree
