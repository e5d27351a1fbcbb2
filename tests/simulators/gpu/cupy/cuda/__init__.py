from __future__ import annotations

import threading

_here = threading.local()


def current() -> int:
    """Return the current device of this thread."""
    return getattr(_here, "device", 0)


class Device:
    def __init__(self, index: int) -> None:
        self.id, self.compute_capability = index, "90"
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(current())
        _here.device = self.id
        return self

    def __exit__(self, *how: object) -> None:
        _here.device = self._before.pop()


from . import device, graph, memory, nccl, runtime, stream  # noqa: E402
from .memory import MemoryPool, alloc_pinned_memory, using_allocator  # noqa: E402
from .stream import Event, Stream, get_current_stream  # noqa: E402

__all__ = [
    "Device",
    "Event",
    "MemoryPool",
    "Stream",
    "alloc_pinned_memory",
    "current",
    "device",
    "get_current_stream",
    "graph",
    "memory",
    "nccl",
    "runtime",
    "stream",
    "using_allocator",
]
