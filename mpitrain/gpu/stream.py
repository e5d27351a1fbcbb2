"""Streams of a GPU: what one is given is done in its order, beside what others are given, while the host goes on."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from ..core.layout import Array, Shape


class Stream:
    """A queue of work of the current GPU. Nothing here waits but ``wait``."""

    def __init__(self) -> None:
        self.raw = cupy.cuda.Stream(non_blocking=True)

    def copy_to_device(self, host: Array, there: Array) -> None:
        """Copy to the GPU; ``host`` must stay as it is until the stream has come there. Both C-contiguous."""
        self._copy(there.data.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice)  # type: ignore[attr-defined]

    def copy_to_host(self, there: Array, host: Array) -> None:
        """Copy from the GPU; ``host`` has it when the stream has come there. Both C-contiguous."""
        self._copy(host.ctypes.data, there.data.ptr, host.nbytes, runtime.memcpyDeviceToHost)  # type: ignore[attr-defined]

    def copy(self, source: Any, target: Any) -> None:
        """Copy memory of this GPU, or of another one, to this one's; both C-contiguous, of one size."""
        if source.device.id == target.device.id:
            self._copy(target.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDeviceToDevice)
            return
        places = target.data.ptr, target.device.id, source.data.ptr, source.device.id
        runtime.memcpyPeerAsync(*places, source.nbytes, self.raw.ptr)

    def record(self, event: Any = None) -> Any:
        """An event, new or used again: that all this stream has been given until now is done."""
        event = cupy.cuda.Event(disable_timing=True) if event is None else event
        event.record(self.raw)
        return event

    def wait_event(self, event: Any) -> None:
        """Do what comes from now on after an event of another stream."""
        self.raw.wait_event(event)

    def wait(self) -> None:
        """Return when all that this stream has been given is done."""
        self.raw.synchronize()

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        if nbytes:
            runtime.memcpyAsync(target, source, nbytes, kind, self.raw.ptr)


def pinned(shape: Shape, dtype: Any) -> Array:
    """Memory of this process that a GPU copies from and to by itself; zeros."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = cupy.cuda.alloc_pinned_memory(max(1, nbytes))
    array = np.frombuffer(memory, np.uint8, nbytes).view(dtype).reshape(shape)
    array[...] = 0
    return array
