"""Copying parameters, optimizer state and other objects between ranks. All functions are collective over the ranks."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from .. import world
from ..process_sets import ProcessSet, global_process_set
from .operations import allgather, broadcast_, broadcast_async_
from .submission import synchronize


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copy parameters from a rank to all ranks, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or a list of tensors.

    Raises:
        ValueError: ``params`` is none of these.
    """
    if isinstance(params, dict):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, Tensor)):
        pairs = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"broadcast_parameters takes a state_dict or a list of parameters, not {type(params)}")
    handles = [broadcast_async_(value.detach(), root_rank, name) for name, value in pairs if isinstance(value, Tensor)]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Copy an optimizer's state and options from a rank to all ranks, also if the optimizer has no state yet.

    Args:
        model: Not needed; accepted because Horovod has it.

    Raises:
        ValueError: The optimizer is LBFGS, whose state does not belong to parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of LBFGS cannot be broadcast; every rank starts without state")
    state = optimizer.state_dict()
    if not state["state"]:
        _set_missing_gradients(optimizer)
    tensors: list[Tensor] = []

    def place(tensor: Tensor) -> _Place:
        tensors.append(tensor)
        return _Place(len(tensors) - 1)

    skeleton = _replaced(state, Tensor, place)
    skeleton, forms = broadcast_object(
        (skeleton, [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]),
        root_rank,
        "optimizer state",
    )
    if world.current().rank != root_rank:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in forms]
    for index, tensor in enumerate(tensors):
        broadcast_(tensor, root_rank, f"optimizer state {index}")
    if world.current().rank != root_rank:
        optimizer.load_state_dict(_replaced(skeleton, _Place, lambda place: tensors[place.index]))


def _set_missing_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set missing gradients to zeros, as Horovod does; programs may rely on this."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class _Place:
    """Takes the place of a tensor in a pickled object."""

    def __init__(self, index: int) -> None:
        self.index = index


def _replaced(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples, in which each object of a type is replaced."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replaced(item, kind, replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, kind, replace) for item in value)
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return a rank's object on all ranks of a process set. cloudpickle must be able to pickle it.

    Args:
        root_rank: The sender's rank among all ranks, also for a process set.
        name: Name of the operation, equal on all ranks.
    """
    name = name or "broadcast_object"
    is_root = world.current().rank == root_rank
    content = _to_bytes(obj) if is_root else torch.zeros(0, dtype=torch.uint8, device="cpu")
    size = broadcast_(torch.tensor([len(content)], device="cpu"), root_rank, f"{name}.size", process_set)
    if not is_root:
        content = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
    broadcast_(content, root_rank, f"{name}.content", process_set)
    return obj if is_root else _from_bytes(content)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks. cloudpickle must be able to pickle them.

    Args:
        name: Name of the operation, equal on all ranks.
    """
    name = name or "allgather_object"
    content = _to_bytes(obj)
    sizes = allgather(torch.tensor([len(content)], device="cpu"), f"{name}.size")
    parts = allgather(content, f"{name}.content").split(sizes.tolist())
    return [_from_bytes(part) for part in parts]


def _to_bytes(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _from_bytes(content: Tensor) -> Any:
    return cloudpickle.load(io.BytesIO(content.numpy().tobytes()))
