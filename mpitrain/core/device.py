"""Where arrays live and arithmetic runs: this rank's processor, with NumPy and Numba, or a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from .layout import Array, Shape


class ConvolutionShape(NamedTuple):
    """What a convolution is of.

    Attributes:
        images: (batch, height, width, channels).
        filters: (filters, height, width, channels).
        outputs: (batch, height, width, filters).
        stride: Of the window, down and right.
        padding: Zeros before and after an image's rows, and its columns.
    """

    images: Shape
    filters: Shape
    outputs: Shape
    stride: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]


class Device(Protocol):
    """What a model needs of the place it computes at.

    Attributes:
        name: For people, such as ``cpu``.
        apart: Whether it is a GPU, whose arrays lie in a memory of its own; see ``cuda.gpu.Gpu``.
        xp: The module whose functions take this place's arrays: NumPy, or one that is called like it.
        block_bytes: How much of a convolution's windows is best laid out at a time.
        narrow: The type that activations have there, if it is one of 16 bits: float16, or uint16, which has the bits
            of bfloat16. None for that of parameters.
        kernels: Those that have no form for processors, as functions (see ``cuda.launch``); None on a processor.
    """

    name: str
    is_gpu: bool
    xp: Any
    block_bytes: int
    compute_dtype: np.dtype[Any] | None
    kernels: Any

    @property
    def convolutions(self) -> Any:
        """What makes plans of convolutions there (see ``cuda.convolution``); None where nothing does."""

    def dispatch(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """The form of an element kernel (see ``kernels``) for this place's arrays: same arguments, same result."""

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Uninitialized memory there."""

    def matmul(self, a: Array, b: Array, *, out: Array) -> Array:
        """``out``, which becomes the product of two matrices; each may be transposed, and rows lie further apart."""


class Cpu:
    """The rank's own processor.

    Args:
        index: Which one of several that a rank computes on (``--devices-per-rank``); they differ in name only.
    """

    is_gpu: bool = False
    xp: Any = np
    compute_dtype: np.dtype[Any] | None = None
    kernels: Any = None
    convolutions: Any = None
    # A block of windows is written and then read by products. Measured with 1 MiB of L2: below this size the calls
    # show, above it nothing is gained.
    block_bytes: int = 1 << 20

    def __init__(self, index: int | None = None) -> None:
        self.name = "cpu" if index is None else f"cpu:{index}"

    def __deepcopy__(self, memo: object) -> Cpu:
        return self  # a copy of a model computes at the same place

    def dispatch(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return kernel

    def matmul(self, a: Array, b: Array, *, out: Array) -> Array:
        return np.matmul(a, b, out=out)

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Uninitialized array whose data starts on a cache line of 64 bytes."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        raw = np.empty(nbytes + 64, np.uint8)
        offset = -raw.ctypes.data % 64
        return raw[offset : offset + nbytes].view(dtype).reshape(shape)


CPU = Cpu()
