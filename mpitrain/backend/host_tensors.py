"""Tensors of any layout and device as contiguous CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def check_sizes(row: Sequence[Tensor], tensor: Tensor, size: int, name: str, of: str = "output") -> None:
    """Raise ValueError unless ``row`` has ``size`` tensors with the type and number of elements of ``tensor``."""
    if len(row) != size:
        raise ValueError(f"{name}: {len(row)} {of} tensors for {size} ranks")
    for part in row:
        if part.dtype != tensor.dtype or part.numel() != tensor.numel():
            raise ValueError(
                f"{name}: every {of} tensor must have {tensor.numel()} elements of {tensor.dtype}; "
                f"one has {part.numel()} of {part.dtype}"
            )


def to_host(tensor: Tensor, reads: bool = True) -> Tensor:
    """Return a tensor's elements as a contiguous CPU tensor of shape (n,): a view if possible."""
    if tensor.layout != torch.strided:
        raise ValueError(
            f"the backend mpitrain has dense tensors only, except for all_reduce; the layout is {tensor.layout}: "
            "call to_dense()"
        )
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach().view(-1)
    if not reads:
        return torch.empty(tensor.numel(), dtype=tensor.dtype)
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous().view(-1)


def copy_back(tensor: Tensor, flat: Tensor) -> None:
    """Copy ``flat``, shape (n,), to ``tensor`` if it is not a view of it."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


@contextmanager
def on_host(tensor: Tensor, reads: bool = True, writes: bool = True) -> Iterator[Tensor]:
    """Give a tensor's elements as a contiguous CPU tensor; copy them back if it is not a view of the tensor."""
    flat = to_host(tensor, reads)
    yield flat
    if writes:
        copy_back(tensor, flat)


@contextmanager
def all_on_host(tensors: Sequence[Tensor], reads: bool = True, writes: bool = True) -> Iterator[list[Tensor]]:
    """As ``on_host``, of several tensors."""
    flats = [to_host(tensor, reads) for tensor in tensors]
    yield flats
    if writes:
        for tensor, flat in zip(tensors, flats, strict=True):
            copy_back(tensor, flat)
