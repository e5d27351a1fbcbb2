"""Kernels on NVIDIA GPUs, by CuPy; nothing imports this module where there is none."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from ..core.layout import Array, Shape
from .ops import Pair
from .sources import text


class CupyKernels:
    """Compiles each source at its first use, with NVRTC for the GPU at hand; CuPy keeps the result in its cache folder.

    Launches go to the thread's current device and CuPy's current stream there, and return at once.
    """

    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[int, str], Any] = {}  # a compiled function belongs to one device

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Memory of the device."""
        return cupy.empty(shape, dtype)

    def launch(self, source: str, name: str, grid: Pair, block: Pair, arguments: tuple[Any, ...]) -> None:
        """Start a kernel of ``kernels/<source>.cu``."""
        key = runtime.getDevice(), name
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._module(source).get_function(name)
        function(grid, block, arguments)

    def _module(self, source: str) -> Any:
        if source not in self._modules:
            self._modules[source] = cupy.RawModule(code=text(source), options=("--std=c++17",), backend="nvrtc")
        return self._modules[source]
