"""Memory of GPUs that processes of one node open to each other: CUDA IPC."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from ..core.layout import Array, Shape
from ..errors import DeviceError


class ExportedMemory:
    """Memory of the current GPU that other processes can open.

    It is not of the pool, whose memory has no handle of its own.

    Attributes:
        handle: What ``OpenedMemory`` takes, in another process.

    Raises:
        DeviceError: CUDA cannot do that here.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            self._memory = cupy.cuda.Memory(nbytes)
            self.handle = bytes(runtime.ipcGetMemHandle(self._memory.ptr))
        except runtime.CUDARuntimeError as error:
            raise DeviceError(f"CUDA IPC says: {error}") from error

    def array(self, shape: Shape, dtype: Any) -> Array:
        """The memory as an array."""
        return _array(self._memory, shape, dtype)


class OpenedMemory:
    """Memory that another process has exported, seen from a GPU of this one, which may be the same.

    Args:
        handle: The other process's.
        index: Of this process's GPU.

    Raises:
        DeviceError: CUDA cannot do that here: the GPUs do not reach each other, or the processes are kept apart.
    """

    def __init__(self, handle: bytes, nbytes: int, index: int) -> None:
        try:
            self._address = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        except runtime.CUDARuntimeError as error:
            raise DeviceError(f"CUDA IPC says: {error}") from error
        self._memory = cupy.cuda.UnownedMemory(self._address, nbytes, self, index)

    def array(self, shape: Shape, dtype: Any) -> Array:
        """The memory as an array."""
        return _array(self._memory, shape, dtype)

    def close(self) -> None:
        """Let go of it; before its owner does."""
        runtime.ipcCloseMemHandle(self._address)


def _array(memory: Any, shape: Shape, dtype: Any) -> Array:
    made: Array = cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))
    return made
