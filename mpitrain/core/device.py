"""Devices that hold arrays and compute: the CPU, with NumPy and Numba, or a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from . import ops as cpu_ops
from .layout import Array, Shape
from .winograd import WinogradConvolutions


class Device(Protocol):
    """The interface between a model and the device it computes on.

    Attributes:
        name: Name in messages, such as ``cpu``.
        is_gpu: Whether the device is a GPU, which has its own memory (``gpu.device.Gpu``).
        xp: The array module of the device: NumPy, or a module with the same interface.
        block_bytes: Preferred size of the blocks in which a convolution unfolds its windows.
        multiplies_bias: Whether a convolution multiplies its bias, as a row of the weight, instead of adding it.
        compute_dtype: The 16-bit type of activations, float16 or bfloat16. None if activations have the parameters'
            type.
        ops: The operations on arrays of the device: ``core.ops``, or ``gpu.ops`` with equal signatures.
    """

    name: str
    is_gpu: bool
    xp: Any
    block_bytes: int
    multiplies_bias: bool
    compute_dtype: np.dtype[Any] | None
    ops: Any

    @property
    def convolutions(self) -> Any:
        """The object that plans convolutions (``core.winograd``, ``gpu.cudnn``); None if windows are multiplied."""

    def dispatch(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a kernel for arrays of the CPU on arrays of the device."""

    def owns(self, array: Array) -> bool:
        """Return whether an array is in the device's memory."""

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Return an uninitialized array on the device."""

    def matmul(self, a: Array, b: Array, *, out: Array) -> Array:
        """Set ``out`` to the product of two matrices; each may be transposed or have padded rows."""


class Cpu:
    """The CPU.

    Args:
        index: Index of the device on a rank with several devices (``--devices-per-rank``); it only affects the name.
    """

    is_gpu: bool = False
    xp: Any = np
    compute_dtype: np.dtype[Any] | None = None
    ops: Any = cpu_ops
    # A block of windows is written and then read by products. Measured with 1 MiB of L2: smaller blocks have visible
    # call overhead, larger ones are not faster.
    block_bytes: int = 1 << 20
    multiplies_bias: bool = True  # multiplying the bias saves a pass over the outputs
    convolutions: Any = WinogradConvolutions()

    def __init__(self, index: int | None = None) -> None:
        self.name = "cpu" if index is None else f"cpu:{index}"

    def __deepcopy__(self, memo: object) -> Cpu:
        return self  # a copied model stays on the same device

    def dispatch(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return kernel

    def owns(self, array: Array) -> bool:
        return isinstance(array, np.ndarray)

    def matmul(self, a: Array, b: Array, *, out: Array) -> Array:
        return np.matmul(a, b, out=out)

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Return an uninitialized array whose data starts on a cache line of 64 bytes."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        raw = np.empty(nbytes + 64, np.uint8)
        offset = -raw.ctypes.data % 64
        return raw[offset : offset + nbytes].view(dtype).reshape(shape)


CPU = Cpu()
