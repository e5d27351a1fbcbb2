"""A step as CUDA graphs: what the host would ask of the GPU bit by bit, recorded once and asked for as a whole."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import cupy

from ..core.layout import Array
from .device import Gpu


class StepGraphs:
    """Work on a GPU's stream, cut where others are to be told that part of it is done.

    The work must be the same every time: the same kernels at the same addresses, with the same numbers. Numbers that
    change it reads from memory.

    Args:
        record: Asks for the work, and calls its argument with i where child i of the model has its gradients; returns
            an array of results. Nothing that it asks for is done while it records.
        cuts: Children after which there is a cut.

    Attributes:
        result: What ``record`` returned; its contents are those of the last replay.

    Raises:
        Exception: Whatever ``record`` raises; CUDA refuses what cannot be recorded.
    """

    def __init__(self, gpu: Gpu, record: Callable[[Callable[[int], None]], Array], cuts: Collection[int]) -> None:
        self._stream, self._cuts = gpu.compute.raw, cuts
        self._pieces: list[tuple[Any, int | None]] = []
        # What the work takes for itself must not be given to anybody else afterwards.
        self._memory = cupy.cuda.MemoryPool(cupy.get_default_memory_pool().malloc)
        with cupy.cuda.using_allocator(self._memory.malloc):
            self._begin()
            try:
                self.result = record(self._reached)
            except BaseException:
                with suppress(Exception):  # CUDA has its own word on a recording that is broken off
                    self._stream.end_capture()
                raise
            self._pieces.append((self._stream.end_capture(), None))

    @property
    def nbytes(self) -> int:
        """Bytes of the current GPU's memory that the work takes for itself."""
        return int(self._memory.total_bytes())

    def start(self) -> None:
        """Have the first piece done."""
        self._pieces[0][0].launch(self._stream)

    def resume(self, told: Callable[[int], None]) -> None:
        """Have the others done; ``told(i)`` is called at each cut, when all before it has been asked for."""
        for (_, child), (graph, _) in zip(self._pieces, self._pieces[1:], strict=False):
            assert child is not None
            told(child)
            graph.launch(self._stream)

    def _begin(self) -> None:
        self._stream.begin_capture()  # relaxed, as CuPy has it: the work may take memory, which a stricter mode forbids

    def _reached(self, child: int) -> None:
        if child in self._cuts:
            self._pieces.append((self._stream.end_capture(), child))
            self._begin()
