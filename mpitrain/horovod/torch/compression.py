"""Compression of gradients for their exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Compressor:
    """The interface of compressors, which programs may implement."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the compressed tensor, and the context that ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the decompressed tensor, in its original type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors uncompressed."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16, and also adds them in float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


def check_compression(compression: type[Compressor]) -> None:
    """Check that an argument has the interface of a compressor.

    Raises:
        ValueError: The argument does not have the methods ``compress`` and ``decompress``.
    """
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise ValueError(f"compression must be Compression.none, Compression.fp16 or a Compressor, not {compression!r}")


def compress(compression: type[Compressor], tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Any]]:
    """Return for each tensor the compressed tensor, and the context that ``decompress`` needs.

    Raises:
        ValueError: ``compression`` is not a compressor.
    """
    check_compression(compression)
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    return compressed, contexts


class Compression:
    """The compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
