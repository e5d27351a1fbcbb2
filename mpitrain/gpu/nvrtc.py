"""Kernels on NVIDIA GPUs, compiled with CuPy. Imported only if there is a GPU."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from ..core.layout import Array, Shape
from .ops import Pair
from .sources import text


class CupyKernels:
    """Compiles each source at first use with NVRTC, for the current GPU; CuPy caches the result on disk.

    Launches go to the thread's current device and CuPy's current stream, and return immediately.
    """

    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[int, str], Any] = {}  # compiled functions are per device

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Return uninitialized device memory."""
        return cupy.empty(shape, dtype)

    def launch(self, source: str, name: str, grid: Pair, block: Pair, arguments: tuple[Any, ...]) -> None:
        """Launch a kernel of ``kernels/<source>.cu``."""
        key = runtime.getDevice(), name
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._module(source).get_function(name)
        function(grid, block, arguments)

    def _module(self, source: str) -> Any:
        if source not in self._modules:
            self._modules[source] = cupy.RawModule(code=text(source), options=("--std=c++17",), backend="nvrtc")
        return self._modules[source]
