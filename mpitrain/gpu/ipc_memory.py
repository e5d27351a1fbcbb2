"""GPU memory shared between processes of a node: CUDA IPC."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from ..core.layout import Array, Shape
from ..errors import DeviceError


class ExportedMemory:
    """Memory of the current GPU that other processes can open.

    It is not allocated from the pool, whose allocations have no handles of their own.

    Attributes:
        handle: Handle for ``OpenedMemory`` in another process.

    Raises:
        DeviceError: CUDA IPC is not available.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            self._memory = cupy.cuda.Memory(nbytes)
            self.handle = bytes(runtime.ipcGetMemHandle(self._memory.ptr))
        except runtime.CUDARuntimeError as error:
            raise DeviceError(f"CUDA IPC failed: {error}") from error

    def array(self, shape: Shape, dtype: Any) -> Array:
        """Return the memory as an array."""
        return _array(self._memory, shape, dtype)


class OpenedMemory:
    """Memory exported by another process, accessible from a GPU of this process, which may be the same GPU.

    Args:
        handle: The exporting process's handle.
        index: Device index in this process.

    Raises:
        DeviceError: CUDA IPC is not available: the GPUs have no peer access, or the processes are isolated.
    """

    def __init__(self, handle: bytes, nbytes: int, index: int) -> None:
        try:
            self._address = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        except runtime.CUDARuntimeError as error:
            raise DeviceError(f"CUDA IPC failed: {error}") from error
        self._memory = cupy.cuda.UnownedMemory(self._address, nbytes, self, index)

    def array(self, shape: Shape, dtype: Any) -> Array:
        """Return the memory as an array."""
        return _array(self._memory, shape, dtype)

    def close(self) -> None:
        """Close the memory; must precede freeing it in the exporting process."""
        runtime.ipcCloseMemHandle(self._address)


def _array(memory: Any, shape: Shape, dtype: Any) -> Array:
    made: Array = cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))
    return made
