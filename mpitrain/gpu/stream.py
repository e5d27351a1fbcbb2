"""CUDA streams: operations run in order, concurrently with other streams and the host."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from ..core.layout import Array, Shape

_log = logging.getLogger(__name__)
_ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled


class Stream:
    """A stream of the current GPU. Only ``wait`` blocks the host."""

    def __init__(self) -> None:
        self.raw = cupy.cuda.Stream(non_blocking=True)

    def copy_to_device(self, host: Array, device: Array) -> None:
        """Copy to the GPU; ``host`` must not change until the copy is done. Both C-contiguous."""
        self._copy(device.data.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice)  # type: ignore[attr-defined]

    def copy_to_host(self, device: Array, host: Array) -> None:
        """Copy from the GPU; ``host`` is valid when the copy is done. Both C-contiguous."""
        self._copy(host.ctypes.data, device.data.ptr, host.nbytes, runtime.memcpyDeviceToHost)  # type: ignore[attr-defined]

    def copy(self, source: Any, target: Any) -> None:
        """Copy memory of this or another GPU to this GPU; both arrays C-contiguous and of the same size."""
        if source.device.id == target.device.id:
            self._copy(target.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDeviceToDevice)
            return
        _enable_peer_access(target.device.id, source.device.id)
        _enable_peer_access(source.device.id, target.device.id)
        places = target.data.ptr, target.device.id, source.data.ptr, source.device.id
        runtime.memcpyPeerAsync(*places, source.nbytes, self.raw.ptr)

    def record(self, event: Any = None) -> Any:
        """Record an event, new or reused, after all work enqueued so far."""
        event = cupy.cuda.Event(disable_timing=True) if event is None else event
        event.record(self.raw)
        return event

    def wait_event(self, event: Any) -> None:
        """Make later work of this stream wait for an event of another stream."""
        self.raw.wait_event(event)

    def wait(self) -> None:
        """Return when all enqueued work is done."""
        self.raw.synchronize()

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        if nbytes:
            runtime.memcpyAsync(target, source, nbytes, kind, self.raw.ptr)


@cache
def _enable_peer_access(index: int, peer: int) -> None:
    """Enable access to the memory of another GPU; without this, copies between the GPUs pass through host memory."""
    problem = "" if runtime.deviceCanAccessPeer(index, peer) else "nvidia-smi topo -m shows how they are connected"
    if not problem:
        try:
            with cupy.cuda.Device(index):
                runtime.deviceEnablePeerAccess(peer)
        except runtime.CUDARuntimeError as error:
            problem = "" if error.status == _ALREADY_ENABLED else str(error)
    if problem:
        _log.info(
            "gpu:%d has no peer access to gpu:%d, so copies between them pass through host memory, which is slower; %s",
            index,
            peer,
            problem,
        )


def pinned(shape: Shape, dtype: Any) -> Array:
    """Return an array of zeros in page-locked host memory, which the GPU can access directly."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = cupy.cuda.alloc_pinned_memory(max(1, nbytes))
    array = np.frombuffer(memory, np.uint8, nbytes).view(dtype).reshape(shape)
    array[...] = 0
    return array
