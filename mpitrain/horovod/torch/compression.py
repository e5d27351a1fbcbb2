"""Compression of gradients for their exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """The interface, which programs may implement."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is sent, and what ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor that was sent as it was before."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

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


class Compression:
    """The compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
