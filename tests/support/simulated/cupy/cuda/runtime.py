from __future__ import annotations

import ctypes
import mmap
import os

from . import current, memory, schedule
from .stream import by_number, submit

CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_16BF = 0, 1, 2, 14
memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3  # noqa: N816
cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N816


class CUDARuntimeError(RuntimeError):
    pass


def _visible() -> list[int]:
    there = range(int(os.environ.get("SIMULATED_GPUS", "0")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(there) if chosen is None else [int(name) for name in chosen.split(",") if name and int(name) in there]


def getDeviceCount() -> int:  # noqa: N802
    if not _visible():
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
    return len(_visible())


def getDevice() -> int:  # noqa: N802
    return current()


def getDeviceProperties(device: int) -> dict[str, bytes]:  # noqa: N802
    return {"uuid": bytes([_visible()[device]] * 16), "name": b"Simulated"}


def memGetInfo() -> tuple[int, int]:  # noqa: N802
    return memory.TOTAL - memory.pool().used, memory.TOTAL


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
    assert kind in (1, 2, 3) and size > 0
    submit(lambda: ctypes.memmove(dst, src, size), stream=by_number(stream))


def memcpyPeerAsync(dst: int, dstDevice: int, src: int, srcDevice: int, size: int, stream: int) -> None:  # noqa: N802, N803
    assert dstDevice != srcDevice and size > 0
    submit(lambda: ctypes.memmove(dst, src, size), stream=by_number(stream))


def deviceCanAccessPeer(device: int, peerDevice: int) -> bool:  # noqa: N802, N803
    return device != peerDevice


def deviceSynchronize() -> None:  # noqa: N802
    for queue in schedule._queues:
        queue.drain()


def ipcGetMemHandle(pointer: int) -> bytes:  # noqa: N802
    return memory.shared[pointer].name.encode().ljust(64, b"\0")


_opened: dict[int, mmap.mmap] = {}


def ipcOpenMemHandle(handle: bytes, flags: int) -> int:  # noqa: N802
    name = handle.rstrip(b"\0").decode()
    if f"-{os.getpid()}-" in name:
        raise CUDARuntimeError("cudaErrorDeviceUninitialized: a handle is opened where it was made")
    with open(name, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    pointer = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    _opened[pointer] = mapped
    return pointer


def ipcCloseMemHandle(pointer: int) -> None:  # noqa: N802
    del _opened[pointer]


_registered: set[int] = set()


def hostRegister(address: int, size: int, flags: int) -> None:  # noqa: N802
    assert size > 0 and flags == 0
    if address in _registered:
        raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered")
    _registered.add(address)


def hostUnregister(address: int) -> None:  # noqa: N802
    _registered.remove(address)
