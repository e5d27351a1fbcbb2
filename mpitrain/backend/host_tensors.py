"""Tensors of any layout and device as contiguous CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

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
            f"the backend mpitrain supports only dense tensors, except in all_reduce; the layout is {tensor.layout}: "
            "call to_dense()"
        )
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach().view(-1)
    if not reads:
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous().view(-1)


def copy_back(tensor: Tensor, flat: Tensor) -> None:
    """Copy ``flat``, shape (n,), to ``tensor`` unless ``flat`` is a view of ``tensor``."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def split_rows(tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the numbers of elements of the parts of a tensor's first dimension, one for each rank.

    Args:
        sizes: Rows of each part; empty if they are equal.

    Raises:
        ValueError: The sizes do not fit the tensor.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise ValueError(f"Tensor's dim 0 does not divide equally across group size: {rows} rows, {ranks} ranks")
        sizes = [rows // ranks] * ranks
    if sum(sizes) != rows or len(sizes) != ranks:
        raise ValueError(f"Split sizes doesn't match total dim 0 size: {list(sizes)} of {rows} rows")
    width = tensor.numel() // rows if rows else 0
    return [size * width for size in sizes]


def check_parts(wholes: list[Tensor], parts: list[Tensor], ranks: int, what: str) -> None:
    """Check that each of ``wholes`` has as many elements as its parts on all ranks together, and the same type.

    Raises:
        ValueError: A tensor does not; ``what`` is its name in the message.
    """
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != part.numel() * ranks:
            raise ValueError(
                f"{what} must have {ranks} times as many elements as the other tensor: "
                f"{tuple(whole.shape)} and {tuple(part.shape)}"
            )
        if whole.dtype != part.dtype:
            raise ValueError(f"input and output must have the same type: {part.dtype} and {whole.dtype}")
