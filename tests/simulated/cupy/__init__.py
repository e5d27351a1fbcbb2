"""Stands in for CuPy where no GPU can be had: as much of it as mpitrain uses, on the CPU.

It is no proof that CuPy does what it is asked; that all names exist in the real one is tested elsewhere. What it shows
is that what mpitrain asks for is right: which array goes where, when it is copied, which kernel runs with which
arguments and on which device. Arrays are kept apart from NumPy's as CuPy does: to mix the two is an error.

    SIMULATED_GPUS: how many there are (CUDA_VISIBLE_DEVICES chooses among them)
    SIMULATED_GPU_BYTES: memory of each
    SIMULATED_CUDA_LIBRARY: the kernels, as tests/unit/cuda/emulated.py builds them
"""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy

from . import cuda
from .cuda import memory

__version__ = "14.simulated"


class _Pointer:
    def __init__(self, address: int) -> None:
        self.ptr = address


class ndarray(numpy.ndarray):
    """Memory of a device."""

    device_id = -1

    def __array_finalize__(self, source: Any) -> None:
        self.device_id = getattr(source, "device_id", -1)

    @property
    def data(self) -> _Pointer:  # type: ignore[override]
        return _Pointer(self.ctypes.data)

    def get(self, out: numpy.ndarray | None = None) -> numpy.ndarray:
        _is_host(out)
        if out is None:
            return numpy.array(self.view(numpy.ndarray))
        assert out.shape == self.shape and out.dtype == self.dtype and out.flags.c_contiguous
        out[...] = self.view(numpy.ndarray)
        return out

    def set(self, host: numpy.ndarray) -> None:
        _is_host(host)
        assert host.shape == self.shape and host.dtype == self.dtype and self.flags.c_contiguous
        self.view(numpy.ndarray)[...] = host

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        for array in (*inputs, *out):
            _is_here(array)
        plain = [_plain(array) for array in inputs]
        if out:
            options["out"] = tuple(_plain(array) for array in out)
        result = getattr(ufunc, method)(*plain, **options)
        return out[0] if out else _made(result, self)

    def __array_function__(self, function: Any, kinds: Any, arguments: Any, options: Any) -> Any:
        raise TypeError(f"{function.__name__} of NumPy was given memory of a GPU")

    def __setitem__(self, key: Any, value: Any) -> None:
        _is_here(value)
        super().__setitem__(key, value)

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")


def _is_host(array: Any) -> None:
    assert array is None or type(array) is numpy.ndarray, type(array)


def _is_here(array: Any) -> None:
    if isinstance(array, numpy.ndarray) and not isinstance(array, ndarray) and array.ndim:
        raise TypeError(f"Unsupported type {type(array)}")
    if isinstance(array, ndarray):
        assert array.device_id == cuda.current(), f"memory of GPU {array.device_id} is used on {cuda.current()}"


def _plain(array: Any) -> Any:
    return array.view(numpy.ndarray) if isinstance(array, ndarray) else array


def _made(result: Any, like: ndarray) -> ndarray:
    made = numpy.asarray(result).view(ndarray)
    made.device_id = like.device_id
    return made


def empty(shape: Any, dtype: Any = float) -> ndarray:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = numpy.dtype(dtype)
    memory.take(math.prod(shape) * dtype.itemsize)
    made = numpy.empty(shape, dtype)
    made.reshape(-1).view(numpy.uint8)[...] = 0xFF  # NaN of a float
    return _made(made, _Like())


class _Like:
    @property
    def device_id(self) -> int:
        return cuda.current()


def ascontiguousarray(array: ndarray) -> ndarray:
    _is_here(array)
    return array if array.flags.c_contiguous else _made(numpy.ascontiguousarray(_plain(array)), array)


def _function(name: str) -> Any:
    plain = getattr(numpy, name)

    def call(*inputs: Any, **options: Any) -> Any:
        assert any(isinstance(array, ndarray) for array in inputs), f"cupy.{name} was given no memory of a GPU"
        return plain(*inputs, **options)

    call.reduce = plain.reduce  # type: ignore[attr-defined]
    return call


abs, add, exp, maximum, negative, sqrt, tanh = map(
    _function, ("abs", "add", "exp", "maximum", "negative", "sqrt", "tanh")
)


def get_default_memory_pool() -> memory.MemoryPool:
    return memory.pool()


_one_at_a_time = threading.Lock()  # the emulated kernels are no more than that


class RawModule:
    def __init__(self, *, code: str, options: tuple[str, ...], backend: str) -> None:
        from tests.unit.cuda.emulated import EmulatedKernels

        assert backend == "nvrtc" and options == ("--std=c++17",) and "KERNEL" in code
        self._kernels = EmulatedKernels(Path(os.environ["SIMULATED_CUDA_LIBRARY"]))

    def get_function(self, name: str) -> Any:
        def launch(grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
            for argument in arguments:
                _is_here(argument)
            plain = tuple(map(_plain, arguments))
            with _one_at_a_time:
                self._kernels.launch("activation", name, grid, block, plain)

        return launch
