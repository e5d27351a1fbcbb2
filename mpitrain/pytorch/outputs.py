"""Outputs and labels of many batches, for metrics."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset

from ..core.words import counted, one_line
from ..data.batch import CollatedBatch
from ..errors import JobError
from .batches import inputs_of
from .bfloat16 import to_bfloat16

_HALF = (torch.float16, torch.bfloat16)


def on_host(tree: Any) -> Any:
    """Return a copy of a tree of tensors in host memory, 16-bit numbers as float32; mappings become dicts."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", torch.float32 if tree.dtype in _HALF else None, copy=True)
    if isinstance(tree, Mapping):
        return {name: on_host(item) for name, item in tree.items()}
    return tuple(map(on_host, tree)) if isinstance(tree, (tuple, list)) else tree


def joined(parts: Sequence[Any]) -> Any:
    """Return one tree for the trees of several batches, with tensors joined along the first dimension.

    Tensors without dimensions, such as a loss that a model returns, become a tensor with one element per batch; of
    other values, the first is returned.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.ndim else torch.stack(list(parts))
    if isinstance(first, dict):
        return {name: joined([part[name] for part in parts]) for name in first}
    return tuple(map(joined, zip(*parts, strict=True))) if isinstance(first, tuple) else first


def outputs_of(model: nn.Module, batch: Any, dtype: Any, device: Any) -> tuple[Any, Any]:
    """Return a module's outputs and the labels for a batch of a ``DataLoader``, converted by ``on_host``.

    Args:
        dtype: Type of the parameters; floating-point inputs are converted to it.

    Raises:
        JobError: The batch has no labels, or the module does not accept the inputs.
    """
    inputs = inputs_of(CollatedBatch(batch, None, 0), dtype, device)
    args, kwargs = inputs.args, inputs.kwargs
    if all(param.dtype == torch.bfloat16 for param in model.parameters()):
        args, kwargs = to_bfloat16(args), to_bfloat16(kwargs)
    try:
        return on_host(model(*args, **kwargs)), on_host(inputs.labels)
    except (TypeError, RuntimeError) as error:
        entries = f"its entries {', '.join(kwargs)} by name" if kwargs else f"{counted(len(args), 'tensor')} of it"
        raise JobError(
            f"trainer.evaluate passes a batch of the loader to the model, {entries}, and the model raised "
            f"{type(error).__name__}: {one_line(error)}; what the loop does with a batch before the model belongs into "
            "the dataset or collate_fn"
        ) from error


def share_of(loader: Any, rank: int, size: int) -> Iterable[tuple[int, Any]]:
    """Return every ``size``-th batch of a loader from the batch ``rank`` on, with its number. Local.

    Raises:
        JobError: The loader is not a ``DataLoader`` whose batches are the same on all ranks.
    """
    if not isinstance(loader, DataLoader):
        raise JobError(f"trainer.evaluate got {type(loader).__name__}: must be a torch DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise JobError("trainer.evaluate got a DataLoader of an IterableDataset: must be of a map-style dataset")
    if not loader.batch_sampler:
        raise JobError("trainer.evaluate got a DataLoader with batch_size=None: set batch_size")
    batches: Any = loader.batch_sampler  # if the user has made it, its sampler may differ from ``loader.sampler``
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    if not isinstance(sampler, SequentialSampler):
        raise JobError(
            f"trainer.evaluate got a DataLoader with a {type(sampler).__name__}: must have all examples in "
            "order, without shuffle or sampler, because evaluate divides its batches among the workers"
        )
    own = DataLoader(
        loader.dataset,
        batch_sampler=list(loader.batch_sampler)[rank::size],
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    return zip(itertools.count(rank, size), own, strict=False)


def facts_of(loader: DataLoader[Any]) -> tuple[object, ...]:
    """Return a loader's numbers of examples and batches, and a subset's indices, which must be equal on all ranks."""
    dataset: Any = loader.dataset
    indices = hash(tuple(map(int, dataset.indices))) if isinstance(dataset, Subset) else None
    return len(dataset), len(loader), indices


def are_scores(outputs: Any, labels: Any) -> bool:
    """Return whether outputs are scores of classes, shape (batch, classes, ...), and labels are classes."""
    if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor) or outputs.dim() < 2:
        return False
    return not labels.is_floating_point() and labels.shape == (len(outputs), *outputs.shape[2:])


def correct_predictions(outputs: Any, labels: Any, ignored: int | None) -> tuple[int, int]:
    """Return the numbers of correct and of all predictions; zeros if outputs are not scores, shape (batch, classes).

    Args:
        ignored: Predictions for labels with this value are left out.
    """
    if not are_scores(outputs, labels) or outputs.dim() != 2:
        return 0, 0
    if ignored is not None:
        counts = labels.long() != ignored
        outputs, labels = outputs[counts], labels[counts]
    return int((outputs.argmax(dim=1) == labels).sum()), len(labels)
