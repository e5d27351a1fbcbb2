"""Kernels on NVIDIA GPUs, compiled with CuPy. Imported only if there is a GPU."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime
from cupy_backends.cuda.api import driver

from ..core.layout import Array, Shape
from ..errors import DeviceError
from .ops import Kernel, Pair
from .ops.grid import THREADS
from .sources import text


class CupyKernels:
    """Compiles each source at first use with NVRTC, for one type and the current GPU; CuPy caches the result on disk.

    Launches go to the thread's current device and CuPy's current stream, and return immediately.
    """

    def __init__(self) -> None:
        self._modules: dict[tuple[str, str], Any] = {}
        self._functions: dict[tuple[int, Kernel], tuple[Any, int]] = {}  # compiled functions are per device

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Return uninitialized device memory."""
        return cupy.empty(shape, dtype)

    def launch(self, kernel: Kernel, grid: Pair, block: Pair, arguments: tuple[Any, ...]) -> None:
        function, _ = self._loaded(kernel)
        function(grid, block, arguments)

    def compile(self, source: str, stored: str) -> None:
        """Compile ``kernels/<source>.cu`` for a type and the current GPU, unless CuPy's cache on disk has it.

        Raises:
            DeviceError: The compilation failed.
        """
        try:
            self._module(source, stored).compile()
        except Exception as error:  # for example the compiler's messages, a missing library or header, a full disk
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = next((line for line in lines if "error" in line), lines[0])
            raise DeviceError(
                f"the GPU kernels ({source}.cu) do not compile: {reason}; reinstall CuPy: "
                "pip install --force-reinstall 'mpitrain[cuda13]', or cuda12 with CUDA 12"
            ) from error

    def resident_blocks(self, kernel: Kernel) -> int:
        """Return the number of blocks of ``THREADS`` threads that the current GPU runs at once."""
        return self._loaded(kernel)[1]

    def _loaded(self, kernel: Kernel) -> tuple[Any, int]:
        """Return a kernel loaded on the current GPU, and its ``resident_blocks``."""
        device = runtime.getDevice()
        if (device, kernel) not in self._functions:
            function = self._module(kernel.source, kernel.stored).get_function(f"{kernel.name}_{kernel.stored}").kernel
            multiprocessors = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)
            blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, THREADS, 0)
            self._functions[device, kernel] = function, multiprocessors * blocks
        return self._functions[device, kernel]

    def _module(self, source: str, stored: str) -> Any:
        if (source, stored) not in self._modules:
            options = "--std=c++17", f"-DSTORED={stored}"  # CuPy adds -ftz=true, which flushes subnormal numbers
            self._modules[source, stored] = cupy.RawModule(code=text(source), options=options, backend="nvrtc")
        return self._modules[source, stored]
