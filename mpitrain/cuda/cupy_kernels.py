"""Kernels on an NVIDIA GPU, by CuPy. The only module that imports it; nothing imports this one where there is none."""

from __future__ import annotations

from typing import Any

import cupy

from ..params import Array, Shape
from .launch import Pair
from .sources import text


class CupyKernels:
    """Compiles each source at its first use, with NVRTC for the GPU at hand; CuPy keeps the result in its cache folder.

    Launches go to CuPy's current stream, and return at once.
    """

    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}

    def empty(self, shape: Shape, dtype: Any) -> Array:
        """Memory of the device."""
        return cupy.empty(shape, dtype)

    def launch(self, source: str, name: str, grid: Pair, block: Pair, arguments: tuple[Any, ...]) -> None:
        """Start a kernel of ``kernels/<source>.cu``."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._module(source).get_function(name)
        function(grid, block, arguments)

    def _module(self, source: str) -> Any:
        if source not in self._modules:
            self._modules[source] = cupy.RawModule(code=text(source), options=("--std=c++17",), backend="nvrtc")
        return self._modules[source]
