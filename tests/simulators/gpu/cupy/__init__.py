"""Simulates on the CPU the part of CuPy that mpitrain uses.

It checks how mpitrain uses CuPy: the device of every array, the order of copies, and the kernels with their arguments.
It does not check CuPy itself; another test compares the simulator's names with the real CuPy. As in CuPy, mixing device
arrays with NumPy arrays is an error.

    SIMULATED_GPUS: number of GPUs (CUDA_VISIBLE_DEVICES selects some of them)
    SIMULATED_GPU_BYTES: memory of each GPU
    SIMULATED_GPU_BYTES_USED: part of this memory that other processes use
    SIMULATED_NO_PINNING: if set, host memory cannot be page-locked
    SIMULATED_CUDA_LIBRARY: the kernels, built by tests/simulators/emulation/kernels.py
    SIMULATED_COMPILER_LOG: messages of the compiler, which then fails
    SIMULATED_CUPY_CACHE: folder in which each process records the sources that it compiles
    SIMULATED_REPORT: folder in which each process writes a byte for each graph that it launches
    SIMULATED_ORDER: seed of the order in which operations run; see cuda/schedule.py
"""

from __future__ import annotations

import hashlib
import math
import os
import weakref
from pathlib import Path
from typing import Any

import numpy

from . import cuda
from .cuda import memory, stream

__version__ = "14.simulated"


class _Pointer:
    def __init__(self, address: int) -> None:
        self.ptr = address


class ndarray(numpy.ndarray):
    """An array in the memory of a device."""

    device_id = -1

    def __array_finalize__(self, source: Any) -> None:
        self.device_id = getattr(source, "device_id", -1)

    @property
    def data(self) -> _Pointer:  # type: ignore[override]
        return _Pointer(self.ctypes.data)

    @property
    def device(self) -> cuda.Device:
        return cuda.Device(self.device_id)

    @property
    def here(self) -> numpy.ndarray:
        """The array's contents after all work of the current stream."""
        cuda.get_current_stream().synchronize()
        return self.view(numpy.ndarray)

    def get(self, out: numpy.ndarray | None = None) -> numpy.ndarray:
        _is_host(out)
        found = self.here
        if out is None:
            return numpy.array(found)
        assert out.shape == self.shape and out.dtype == self.dtype and out.flags.c_contiguous
        out[...] = found
        return out

    def tolist(self) -> Any:
        return self.here.tolist()

    def __float__(self) -> float:
        return float(self.here)

    def set(self, host: numpy.ndarray) -> None:
        _is_host(host)
        assert host.shape == self.shape and host.dtype == self.dtype and self.flags.c_contiguous
        kept = host.copy()
        stream.submit(lambda: numpy.copyto(self.view(numpy.ndarray), kept))

    def copy(self, order: str = "C") -> ndarray:
        made = empty(self.shape, self.dtype)
        made[...] = self
        return made

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        for array in (*inputs, *out):
            _is_here(array)
        plain = [_plain(array) for array in inputs]
        if out:
            options["out"] = tuple(_plain(array) for array in out)
            stream.submit(lambda: _quietly(ufunc, method, plain, options))
            return out[0]
        like = numpy.asarray(_quietly(ufunc, method, plain, options))
        made = empty(like.shape, like.dtype)
        options["out"] = (made.view(numpy.ndarray),)
        stream.submit(lambda: _quietly(ufunc, method, plain, options))
        return made

    def __array_function__(self, function: Any, kinds: Any, arguments: Any, options: Any) -> Any:
        raise TypeError(f"{function.__name__} of NumPy was given memory of a GPU")

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return (
            found
            if isinstance(found, ndarray)
            else super().__getitem__((*key, ...) if isinstance(key, tuple) else (key, ...))
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        _is_here(self)
        _is_here(value)
        target, plain = self.view(numpy.ndarray), _plain(value)
        if isinstance(plain, numpy.ndarray) and not isinstance(value, ndarray):
            plain = plain.copy()
        stream.submit(lambda: target.__setitem__(key, plain))

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")


def _quietly(ufunc: Any, method: str, inputs: Any, options: Any) -> Any:
    with numpy.errstate(all="ignore"):
        return getattr(ufunc, method)(*inputs, **options)


def _is_host(array: Any) -> None:
    assert array is None or type(array) is numpy.ndarray, type(array)


def _is_here(array: Any) -> None:
    if isinstance(array, numpy.ndarray) and not isinstance(array, ndarray) and array.ndim:
        raise TypeError(f"Unsupported type {type(array)}")
    if isinstance(array, ndarray):
        assert array.device_id == cuda.current(), f"memory of GPU {array.device_id} is used on {cuda.current()}"


def _plain(array: Any) -> Any:
    return array.view(numpy.ndarray) if isinstance(array, ndarray) else array


def empty(shape: Any, dtype: Any = float) -> ndarray:
    assert not cuda.get_current_stream().is_capturing() or memory.is_own_pool(), "a graph's memory may be reused"
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = numpy.dtype(dtype)
    pool = memory.take(math.prod(shape) * dtype.itemsize)
    memory_of_it = bytearray(b"\xff") * (math.prod(shape) * dtype.itemsize)  # NaN as a float
    raw = numpy.frombuffer(memory_of_it, dtype).reshape(shape) if memory_of_it else numpy.empty(shape, dtype)
    address = raw.ctypes.data
    memory.allocated[address] = address + raw.nbytes
    # Later work of the stream that has allocated memory may reuse the memory as soon as it is freed.
    owner = stream.get_current_stream()
    weakref.finalize(
        raw if raw.base is None else _owner(raw), _poison, memory_of_it, owner, pool, address
    ).atexit = False
    made = raw.view(ndarray)
    made.device_id = cuda.current()
    return made


def _owner(raw: numpy.ndarray) -> Any:
    """Return the array from which an array is derived, perhaps over several views."""
    while isinstance(raw.base, numpy.ndarray):
        raw = raw.base
    return raw


def _poison(memory_of_it: bytearray, owner: Any, pool: memory.MemoryPool, address: int) -> None:
    pool._release(len(memory_of_it))
    memory.allocated.pop(address, None)

    def write() -> None:
        memory_of_it[:] = b"\xff" * len(memory_of_it)

    owner.queue.put(stream.Operation(write))


def ascontiguousarray(array: ndarray) -> ndarray:
    _is_here(array)
    return array if array.flags.c_contiguous else array.copy()


def copyto(target: ndarray, source: ndarray, where: ndarray) -> None:
    for array in (target, source, where):
        assert isinstance(array, ndarray)
        _is_here(array)
    plain = [_plain(array) for array in (target, source, where)]
    stream.submit(lambda: numpy.copyto(plain[0], plain[1], where=plain[2]))


def take(a: ndarray, indices: ndarray, axis: int, out: ndarray) -> ndarray:
    for array in (a, indices, out):
        assert isinstance(array, ndarray)
        _is_here(array)
    plain = [_plain(array) for array in (a, indices, out)]
    stream.submit(lambda: numpy.take(plain[0], plain[1], axis=axis, out=plain[2]))
    return out


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


def is_available() -> bool:
    return bool(cuda.runtime._visible())


def get_default_memory_pool() -> memory.MemoryPool:
    return memory.pool()


class CompileException(Exception):
    pass


class RawModule:
    def __init__(self, *, code: str, options: tuple[str, ...], backend: str) -> None:
        from tests.simulators.emulation.kernels import EmulatedKernels

        standard, stored = options
        assert backend == "nvrtc" and standard == "--std=c++17" and "KERNEL" in code
        self._stored = stored.removeprefix("-DSTORED=")
        self._kernels = EmulatedKernels(Path(os.environ["SIMULATED_CUDA_LIBRARY"]))

        self._digest = hashlib.sha256((code + stored).encode()).hexdigest()

    def compile(self) -> None:
        """Record in SIMULATED_CUPY_CACHE that this process compiled the source, unless there is such a record.

        Raises:
            CompileException: SIMULATED_COMPILER_LOG is set.
        """
        if "SIMULATED_COMPILER_LOG" in os.environ:
            raise CompileException(os.environ["SIMULATED_COMPILER_LOG"])
        if "SIMULATED_CUPY_CACHE" in os.environ:
            cache = Path(os.environ["SIMULATED_CUPY_CACHE"])
            if not any(cache.glob(f"{self._digest}-*")):
                cache.joinpath(f"{self._digest}-{os.getpid()}").touch()

    def get_function(self, name: str) -> Any:
        from mpitrain.gpu.ops import Kernel

        self.compile()
        kernel = Kernel("activation", name.removesuffix(f"_{self._stored}"), self._stored)

        def launch(grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
            for argument in arguments:
                _is_here(argument)
            plain = tuple(map(_plain, arguments))
            stream.submit(lambda: self._kernels.launch(kernel, grid, block, plain))

        launch.ptr, launch.kernel = 0, launch  # type: ignore[attr-defined]
        return launch
