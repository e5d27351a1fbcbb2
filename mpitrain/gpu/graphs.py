"""CUDA graphs of a training step: recorded once, then launched as a whole."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import cupy

from ..core.layout import Array
from .device import Gpu


class StepGraphs:
    """Recorded work of a GPU's stream, split at points where the host must be notified.

    The work must be the same every time: the same kernels with the same addresses and arguments. Values that change
    must be read from memory.

    Args:
        record: Enqueues the work and returns an array of results; calls its argument with a number at points of
            the work. Nothing is executed during recording.
        cuts: Numbers of the points at which the work is split.

    Attributes:
        result: The array returned by ``record``; holds the results of the last replay.

    Raises:
        Exception: Any error of ``record``; CUDA rejects operations that cannot be recorded.
    """

    def __init__(self, gpu: Gpu, record: Callable[[Callable[[int], None]], Array], cuts: Collection[int]) -> None:
        self._stream, self._cuts = gpu.compute.raw, cuts
        self._graphs: list[tuple[Any, int | None]] = []
        # A separate memory pool: no other work may reuse the memory that the graphs refer to.
        self._memory = cupy.cuda.MemoryPool(cupy.get_default_memory_pool().malloc)
        with cupy.cuda.using_allocator(self._memory.malloc):
            self._begin()
            try:
                self.result = record(self._reached)
            except BaseException:
                with suppress(Exception):  # CUDA also reports the aborted recording
                    self._stream.end_capture()
                raise
            self._graphs.append((self._stream.end_capture(), None))

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory allocated for the recorded work."""
        return int(self._memory.total_bytes())

    def start(self) -> None:
        """Launch the first graph."""
        self._graphs[0][0].launch(self._stream)

    def resume(self, on_cut: Callable[[int], None]) -> None:
        """Launch the remaining graphs; calls ``on_cut(number)`` at each cut, after all earlier work is launched."""
        for (_, point), (graph, _) in zip(self._graphs, self._graphs[1:], strict=False):
            assert point is not None
            on_cut(point)
            graph.launch(self._stream)

    def _begin(self) -> None:
        self._stream.begin_capture()  # CuPy's relaxed mode; stricter modes forbid allocations

    def _reached(self, point: int) -> None:
        if point in self._cuts:
            self._graphs.append((self._stream.end_capture(), point))
            self._begin()
