"""A GPU as a device, through CuPy; imported only if there is a GPU.

Matrix products use cuBLAS, other operations are in ``gpu.ops``. Each thread has a current device: enter ``activate``
before using a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, cached_property
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from cupy.cuda import runtime
from cupy.cuda.memory import OutOfMemoryError
from cupy_backends.cuda.libs import cublas

from ..core.layout import Array, Shape
from ..errors import DeviceError
from . import ops as gpu_ops
from .cublas import Blas
from .nvml import describe_processes, list_gpus
from .nvrtc import CupyKernels
from .stream import Stream

_log = logging.getLogger(__name__)
_KERNELS = CupyKernels()
_RESERVED = 0.98  # CUDA and its libraries need some memory outside the pool
_DATA_FRACTION = 0.5  # fraction of the memory left by the model, for training data (which could stay on the host)
_PINNED: Counter[int] = Counter()  # page-locked memory of this process, by address: the number of GPUs that use it
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs of this process
# Bytes of the im2col matrix computed at a time: large enough for few kernel launches per layer, and small compared with
# the activations.
_WINDOW_BYTES = 1 << 28


def identify() -> list[str]:
    """Return the identifiers of the GPUs visible to this process, by device index. Local.

    Raises:
        DeviceError: The driver is missing or too old, finds no GPU, or reports no UUID.
    """
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(str(error)) from error
    return [_identifier(index) for index in range(count)]


def _identifier(index: int) -> str:
    """Return a GPU's UUID as hexadecimal digits, as in ``gpu.nvml``.

    The UUID in CuPy's ``getDeviceProperties`` ends at its first zero byte, so this calls the driver.

    Raises:
        DeviceError: The driver reports no UUID.
    """
    driver, device, uuid = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    status = driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetUuid_v2(uuid, device)
    if status != 0:
        raise DeviceError(
            f"the NVIDIA driver reports no UUID for gpu:{index} (CUresult {status}); check the GPU with nvidia-smi"
        )
    return bytes(uuid).hex()


class Gpu:
    """A CUDA device. Work is enqueued on its stream ``compute`` and runs asynchronously, in order.

    Args:
        index: Device index in this process.
        fraction: Maximum fraction of the GPU's memory for arrays of this process. It does not include the memory of
            CUDA and its libraries, nor memory that is shared with other processes.
        growth: Whether to allocate memory as needed, not all at startup (``take_memory``); the attribute ``grows``.
        precision: ``float32``, ``tf32``, ``float16`` or ``bfloat16``. With ``tf32``, products round float32 matrices to
            TF32. With the last two, activations have this type, and products round parameters to it. Products are
            summed in float32.
        is_soft: Whether to run kernels without a GPU implementation on the CPU.

    Raises:
        DeviceError: The memory cannot be allocated.
    """

    is_gpu: bool = True
    xp: Any = cupy
    ops: Any = gpu_ops
    block_bytes: int = _WINDOW_BYTES
    multiplies_bias: bool = False

    def __init__(
        self, index: int, fraction: float, growth: bool = True, precision: str = "float32", is_soft: bool = True
    ) -> None:
        self.index, self.grows, self._precision, self._is_soft = index, growth, precision, is_soft
        self._fallbacks: dict[Callable[..., Any], CpuFallback] = {}
        self.compute_dtype = _COMPUTE_DTYPES.get(precision)
        self._device = cupy.cuda.Device(index)
        self.name = f"gpu:{index}"
        with self._device:
            self.compute = Stream()
        with self.activate():
            cupy.get_default_memory_pool().set_limit(fraction=fraction)
            self._blas = Blas(self.compute.raw.ptr)
        self._pinned: dict[int, Array] = {}  # by address
        gpu_ops.use(_KERNELS)

    def activate(self) -> AbstractContextManager[object]:
        """Return a context in which this thread computes on this GPU.

        Raises:
            DeviceError: The GPU ran out of memory in the context.
        """
        return _Activation(self)

    @property
    def architecture(self) -> str:
        """The compute capability, such as ``90``. Compiled kernels run on every GPU of the same capability."""
        return str(self._device.compute_capability)

    def compile(self, source: str, stored: str) -> None:
        """Compile one of ``sources.variants`` for this GPU, unless it is in CuPy's cache.

        Call within ``activate()``.
        """
        _KERNELS.compile(source, stored)

    def dispatch(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        if kernel not in self._fallbacks:
            self._fallbacks[kernel] = CpuFallback(kernel, self._is_soft)
        return self._fallbacks[kernel]

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
        """Reason why cuDNN is not used for convolutions, logged if it is installed but fails; empty if it is used."""
        if importlib.util.find_spec("cudnn") is None:
            return "cuDNN's frontend is not installed; pip install 'mpitrain[cudnn13]', or cudnn12 with CUDA 12"
        try:
            from .cudnn import ConvolutionPlans

            with self.activate():
                self._convolutions = ConvolutionPlans(self._precision == "tf32")
        except Exception as error:  # a broken installation can raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            _log.warning(
                "cuDNN is installed but does not work, so convolutions use matrix products, which are slower: %s; "
                "reinstall it with pip install --force-reinstall 'mpitrain[cudnn13]', or cudnn12 with CUDA 12",
                reason,
            )
            return f"cuDNN is installed but does not work: {reason}"
        return ""

    def owns(self, array: Array) -> bool:
        return isinstance(array, cupy.ndarray)

    def upload(self, host: Array, out: Array) -> None:
        self.compute.copy_to_device(host, out)
        self.compute.wait()

    def download(self, array: Array, out: Array) -> None:
        self.compute.copy_to_host(array, out)
        self.compute.wait()

    def to_host(self, array: Array) -> Array:
        """Return a copy of an array of the GPU in host memory; waits for the GPU."""
        host = np.empty(array.shape, array.dtype)
        with self.activate():
            self.download(array, host)
        return host

    def copy_of(self, host: Array) -> Array:
        """Return a copy of a host array on the GPU."""
        copy = self.empty(host.shape, host.dtype)
        self.upload(host, copy)
        return copy

    def zeros(self, shape: Shape, dtype: Any) -> Array:
        """Return an array of zeros on the GPU."""
        made = self.empty(shape, dtype)
        made[...] = 0
        return made

    def to_python(self, value: Any) -> Any:
        """Wait for the GPU, and return a GPU array as Python numbers; other values unchanged."""
        return value.tolist() if isinstance(value, cupy.ndarray) else value

    def pin(self, host: Array) -> None:
        """Page-lock ``host`` for direct copies, if the driver supports it. Local."""
        address = host.ctypes.data
        if address in self._pinned or not host.nbytes:
            return
        if not _PINNED[address]:
            try:
                with self.activate():
                    runtime.hostRegister(address, host.nbytes, _PORTABLE)
            except runtime.CUDARuntimeError as error:
                _report_unpinned(str(error))
                return
        _PINNED[address] += 1
        self._pinned[address] = host

    def unpin(self, host: Array) -> None:
        """Undo ``pin``; must precede freeing the memory."""
        address = host.ctypes.data
        if self._pinned.pop(address, None) is None:
            return
        _PINNED[address] -= 1
        if not _PINNED[address]:
            with self.activate():
                runtime.hostUnregister(address)

    @property
    def workspace(self) -> int:
        """Bytes of GPU memory reserved as workspace of matrix products."""
        return self._blas.workspace

    def has_room(self, *arrays: Array) -> bool:
        """Return whether training data fits on the GPU: copies of these arrays take at most half of the free memory."""
        with self.activate():
            pool, (free, _) = cupy.get_default_memory_pool(), runtime.memGetInfo()
            left = min(pool.get_limit() - pool.used_bytes(), pool.free_bytes() + free)
        return bool(sum(array.nbytes for array in arrays) <= _DATA_FRACTION * left)

    @property
    def memory_left(self) -> int:
        """Bytes of this worker's part of the GPU's memory that the pool has not allocated."""
        with self.activate():
            pool = cupy.get_default_memory_pool()
            return int(max(0, pool.get_limit() - pool.total_bytes()))

    def take_memory(self) -> None:
        """Allocate the rest of this worker's part now, unless memory grows.

        Raises:
            DeviceError: This memory cannot be allocated.
        """
        if not self.grows:
            with self.activate():
                free, _ = runtime.memGetInfo()
                cupy.empty(int(min(self.memory_left, free) * _RESERVED), np.uint8)  # the pool keeps freed memory

    @property
    def held(self) -> int:
        """Bytes of GPU memory that the pool of this process has allocated for arrays, used or free."""
        with self.activate():
            return int(cupy.get_default_memory_pool().total_bytes())

    def free(self) -> None:
        """Free GPU memory and unpin host memory; the GPU must not be used afterwards."""
        with self.activate():
            self.compute.wait()
            for host in list(self._pinned.values()):
                self.unpin(host)
            cupy.get_default_memory_pool().free_all_blocks()

    def out_of_memory(self, error: Exception) -> DeviceError:
        """Return the error to report when a model does not fit into memory."""
        free, total = runtime.memGetInfo()
        reason = ". ".join(str(error).split(". ")[:2]).rstrip(".")  # torch's messages continue with advice
        users = next((gpu.users for gpu in list_gpus() if gpu.identifier == identify()[self.index]), [])
        use = f"; other processes on it: {describe_processes(users)}" if users else ""
        return DeviceError(
            f"{self.name} is out of memory: {reason}; {free / 2**30:.1f} of {total / 2**30:.1f} GiB "
            f"are free{use}; reduce --batch-size, raise --accumulate-steps or --gpu-memory-fraction, or use more GPUs"
        )

    def __deepcopy__(self, memo: object) -> Gpu:
        return self  # a copied model stays on the same device


@cache
def _report_unpinned(reason: str) -> None:
    """Report, once for each reason, that host memory cannot be page-locked."""
    _log.warning(
        "host memory cannot be page-locked (%s), so copies to and from the GPU are slower; results are the same", reason
    )


class _ThreadState(threading.local):
    """The GPU that the thread has activated."""

    active: Gpu | None = None


_thread = _ThreadState()


class _Activation:
    """Context of an active GPU; converts its memory errors to ``DeviceError``. Has no effect if the GPU is active."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._device = gpu, cupy.cuda.Device(gpu.index)

    def __enter__(self) -> None:
        self._before = _thread.active
        if self._before is not self._gpu:
            self._device.__enter__()
            self._gpu.compute.raw.__enter__()
            _thread.active = self._gpu

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._before is self._gpu:
            return
        failure = self._gpu.out_of_memory(error) if isinstance(error, OutOfMemoryError) else None
        _thread.active = self._before
        self._gpu.compute.raw.__exit__(kind, error, trace)
        self._device.__exit__(kind, error, trace)
        if failure is not None:
            raise failure from error


_COMPUTE_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# cuBLAS's matrix types; products of 16-bit matrices are summed in float32.
_TYPES = {
    np.dtype(np.float32): runtime.CUDA_R_32F,
    np.dtype(np.float64): runtime.CUDA_R_64F,
    _COMPUTE_DTYPES["float16"]: runtime.CUDA_R_16F,
    _COMPUTE_DTYPES["bfloat16"]: runtime.CUDA_R_16BF,
}


class CpuFallback:
    """A kernel that copies its arrays from the GPU and back for every call: correct but slow.

    Args:
        is_soft: Whether the fallback is allowed.

    Raises:
        DeviceError: The fallback is not allowed.
    """

    def __init__(self, kernel: Callable[..., Any], is_soft: bool) -> None:
        name = kernel.__name__
        if not is_soft:
            raise DeviceError(
                f"--no-soft-placement: the kernel {name} of {kernel.__module__} has no GPU implementation; "
                "remove --no-soft-placement to run it on the CPU, or write the layer with device.xp"
            )
        self._kernel = kernel
        _log.warning(
            "the kernel %s of %s has no GPU implementation and runs on the CPU, which is slow", name, kernel.__module__
        )

    def __call__(self, *arguments: Any) -> Any:
        """Run the kernel and return its result; waits for the GPU."""
        hosts = [array.get() if isinstance(array, cupy.ndarray) else array for array in arguments]
        result = self._kernel(*hosts)
        for array, host in zip(arguments, hosts, strict=True):
            if isinstance(array, cupy.ndarray):
                back = cupy.empty(host.shape, host.dtype)
                back.set(host)
                array[...] = back
        return result
