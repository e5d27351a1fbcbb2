"""A GPU as a device, by CuPy; nothing imports this module where there is none.

Products are cuBLAS's, element kernels those of ``launch``. Each thread has a current device: whoever computes on a GPU
enters ``activate`` first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from cupy_backends.cuda.libs import cublas

from ..core.layout import Array, Shape
from ..errors import DeviceError
from . import ops as launch
from .cpu_fallback import CpuFallback
from .cublas import Blas
from .nvml import describe_processes, list_gpus
from .nvrtc import CupyKernels
from .stream import Stream

_KERNELS = CupyKernels()
_WINDOW_BYTES = 1 << 28  # of a convolution at a time: a few launches a layer, and little beside the activations


def identify() -> list[str]:
    """Identifiers of the GPUs that this process may use, by their number; local.

    Raises:
        DeviceError: The driver is missing or too old, or sees none.
    """
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(str(error)) from error
    return [bytes(runtime.getDeviceProperties(index)["uuid"]).hex() for index in range(count)]


class Gpu:
    """A CUDA device. What is asked of it goes on its own stream, ``compute``, and is done later, in order.

    Args:
        index: Among those that this process may use.
        fraction: Of its memory, the most that this process takes for arrays; CUDA, its libraries and memory that
            other processes open come on top.
        growth: Take memory as it is needed; else all of it at once.
        precision: ``float32``; ``tf32``, to which float32 matrices are rounded for products; or ``float16`` or
            ``bfloat16``, which activations have then, and what parameters are rounded to for products. Sums are float32
            all the same.

    Attributes:
        say: Takes a line for the user.
        is_soft: Let the processor run kernels that have no form for GPUs.

    Raises:
        DeviceError: The memory cannot be had.
    """

    is_gpu: bool = True
    xp: Any = cupy
    kernels: Any = launch
    block_bytes: int = _WINDOW_BYTES
    say: Callable[[str], None] = staticmethod(lambda line: None)

    def __init__(
        self, index: int, fraction: float, growth: bool = True, precision: str = "float32", is_soft: bool = True
    ) -> None:
        self.index, self._precision, self._is_soft = index, precision, is_soft
        self._dispatched: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.compute_dtype = _COMPUTE_DTYPES.get(precision)
        self._device = cupy.cuda.Device(index)
        self.name = f"gpu:{index}"
        with self._device:
            self.compute = Stream()
        with self.activate():
            pool = cupy.get_default_memory_pool()
            pool.set_limit(fraction=fraction)
            if not growth:
                cupy.empty(int(pool.get_limit() * 0.98), np.uint8)  # the pool keeps what is given back to it
            self._blas = Blas(self.compute.raw.ptr)
        self._pinned: dict[int, Array] = {}  # by address
        launch.use(_KERNELS)

    def activate(self) -> AbstractContextManager[object]:
        """A block in which this thread computes on this GPU.

        Raises:
            DeviceError: Memory has run out in it.
        """
        return _Activation(self)

    def dispatch(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        dispatch = self._dispatched.get(kernel)
        if dispatch is None:
            own = kernel.__module__.startswith("mpitrain.")
            dispatch = getattr(launch, kernel.__name__.removeprefix("_")) if own else None
            self._dispatched[kernel] = dispatch = dispatch or CpuFallback(kernel, self.say, self._is_soft)
        return dispatch

    def empty(self, shape: Shape, dtype: Any) -> Array:
        made: Array = cupy.empty(shape, dtype)
        return made

    def matmul(self, a: Any, b: Any, *, out: Any) -> Array:
        compute = cublas.CUBLAS_COMPUTE_64F if out.dtype == np.float64 else cublas.CUBLAS_COMPUTE_32F
        if a.dtype == np.float32 and self._precision == "tf32":
            compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32
        return self._blas.gemm(a, b, out, _TYPES, compute)

    @cached_property
    def convolutions(self) -> Any:
        return None if self.why_no_cudnn else self._convolutions

    @cached_property
    def why_no_cudnn(self) -> str:
        """Why convolutions are products of matrices, if they are."""
        if importlib.util.find_spec("cudnn") is None:
            return "cuDNN's frontend is not installed: pip install 'mpitrain[cudnn13]', or cudnn12 for an older driver"
        try:
            from .cudnn import ConvolutionPlans

            with self.activate():
                self._convolutions = ConvolutionPlans(self._precision == "tf32", lambda line: self.say(line))
        except Exception as error:  # an installation can be broken in any way
            told = str(error).strip() or type(error).__name__
            return f"cuDNN's frontend is installed, and says: {told.splitlines()[0]}"
        return ""

    def owns(self, array: Array) -> bool:
        return isinstance(array, cupy.ndarray)

    def upload(self, host: Array, out: Array) -> None:
        self.compute.copy_to_device(host, out)
        self.compute.wait()

    def download(self, there: Array, out: Array) -> None:
        self.compute.copy_to_host(there, out)
        self.compute.wait()

    def copy_of(self, host: Array) -> Array:
        """A copy of an array of this process."""
        there = self.empty(host.shape, host.dtype)
        self.upload(host, there)
        return there

    def zeros(self, shape: Shape, dtype: Any) -> Array:
        """Memory of this GPU, with zeros in it."""
        made = self.empty(shape, dtype)
        made[...] = 0
        return made

    def numbers(self, value: Any) -> Any:
        return value.tolist() if isinstance(value, cupy.ndarray) else value

    def pin(self, host: Array) -> None:
        """Have copies from and to ``host`` pass by no staging buffer, where the driver can; local."""
        address = host.ctypes.data
        if address in self._pinned or not host.nbytes:
            return
        with self.activate(), suppress(runtime.CUDARuntimeError):  # slower, and as right
            runtime.hostRegister(address, host.nbytes, 0)
            self._pinned[address] = host

    def unpin(self, host: Array) -> None:
        """Take that back, before the memory is given back."""
        address = host.ctypes.data
        if address in self._pinned:
            with self.activate():
                runtime.hostUnregister(address)
            del self._pinned[address]

    @property
    def workspace(self) -> int:
        """Bytes of it that products have for themselves."""
        return self._blas.workspace

    @property
    def held(self) -> int:
        """Bytes that this process has taken of this GPU's memory, for arrays."""
        with self.activate():
            return int(cupy.get_default_memory_pool().total_bytes())

    def free(self) -> None:
        """Give memory back to the GPU, and let go of the host's; nothing may compute here any more."""
        with self.activate():
            self.compute.wait()
            for address in self._pinned:
                runtime.hostUnregister(address)
            self._pinned.clear()
            cupy.get_default_memory_pool().free_all_blocks()

    def out_of_memory(self, error: MemoryError) -> DeviceError:
        """What to tell a user whose model does not fit."""
        free, total = runtime.memGetInfo()
        users = next((gpu.users for gpu in list_gpus() if gpu.identifier == identify()[self.index]), [])
        use = f", and others are on it: {describe_processes(users)}" if users else ""
        return DeviceError(
            f"{self.name} is out of memory: {str(error).rstrip('.')}; {free / 2**30:.1f} of {total / 2**30:.1f} GiB "
            f"are free{use}; lower --batch-size, raise --accumulate-steps or --gpu-memory-fraction, or take more GPUs"
        )

    def __deepcopy__(self, memo: object) -> Gpu:
        return self  # a copy of a model computes at the same place


class _Activation:
    """Enters a GPU, and tells in words when its memory has run out."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._device = gpu, cupy.cuda.Device(gpu.index)

    def __enter__(self) -> None:
        self._device.__enter__()
        self._gpu.compute.raw.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        told = self._gpu.out_of_memory(error) if isinstance(error, MemoryError) else None
        self._gpu.compute.raw.__exit__(kind, error, trace)
        self._device.__exit__(kind, error, trace)
        if told is not None:
            raise told from error


# What cuBLAS calls types of matrices; those of 16 bits are summed in float32. The bits of bfloat16 come as uint16.
_TYPES = {"f": runtime.CUDA_R_32F, "d": runtime.CUDA_R_64F, "e": runtime.CUDA_R_16F, "H": runtime.CUDA_R_16BF}
_COMPUTE_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}
