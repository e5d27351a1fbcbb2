"""The properties that ranks must agree on: the signature of an operation, and its text in errors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def describe(name: str, agreed: tuple[object, ...]) -> tuple[str, int]:
    """Return the text and the signature of an operation."""
    text = " ".join([name, *map(text_of, agreed)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return text, int.from_bytes(digest, "little", signed=True)


def text_of(value: object) -> str:
    """Return a text such as ``float32``, ``(3, 4)`` or both."""
    if isinstance(value, torch.Size):
        return str(tuple(value))
    if isinstance(value, tuple):
        return " ".join(map(text_of, value))
    return str(value).removeprefix("torch.")


def shapes_of(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Return the data types and shapes of tensors, which must be the same on all ranks."""
    if len(tensors) == 1:
        return (tensors[0].dtype, tensors[0].shape)
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)
