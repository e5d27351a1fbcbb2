from __future__ import annotations

import ctypes
import os
from typing import Any

from libraries import libraries

from . import current, memory, schedule
from .stream import by_number, submit

CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_16BF = 0, 1, 2, 14
memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3  # noqa: N816
cudaDevAttrMultiProcessorCount = 16  # noqa: N816


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _visible() -> list[int]:
    there = range(int(os.environ.get("SIMULATED_GPUS", "0")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(there) if chosen is None else [int(name) for name in chosen.split(",") if name and int(name) in there]


def getDeviceCount() -> int:  # noqa: N802
    if not _visible():
        raise CUDARuntimeError(100, "cudaErrorNoDevice: no CUDA-capable device is detected")
    return len(_visible())


def getDevice() -> int:  # noqa: N802
    return current()


def getDeviceProperties(device: int) -> dict[str, bytes]:  # noqa: N802
    return {"uuid": _uuid(device).split(b"\0")[0], "name": b"Simulated"}  # CuPy cuts a UUID at its first zero byte


def _uuid(device: int) -> bytes:
    return b"\x11\0" + bytes([_visible()[device]] * 14)


class _Driver:
    """Functions of libcuda that mpitrain calls with ctypes."""

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal
        return 0 if ordinal < len(_visible()) else 101

    def cuDeviceGetUuid_v2(self, uuid: Any, device: Any) -> int:  # noqa: N802
        uuid[:] = _uuid(device.value)
        return 0


libraries["libcuda.so.1"] = _Driver()


def deviceGetAttribute(attrib: int, device: int) -> int:  # noqa: N802
    assert attrib == cudaDevAttrMultiProcessorCount and device in range(len(_visible()))
    return 20


def memGetInfo() -> tuple[int, int]:  # noqa: N802
    return memory.TOTAL - memory.USED_BY_OTHERS - memory.pool().total_bytes(), memory.TOTAL


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
    assert size > 0
    places = memory.is_on_device(src), memory.is_on_device(dst)
    assert places == {1: (False, True), 2: (True, False), 3: (True, True)}[kind], f"memcpy of kind {kind}"
    submit(lambda: ctypes.memmove(dst, src, size), stream=by_number(stream))


def memcpyPeerAsync(dst: int, dstDevice: int, src: int, srcDevice: int, size: int, stream: int) -> None:  # noqa: N802, N803
    assert dstDevice != srcDevice and size > 0
    assert {(dstDevice, srcDevice), (srcDevice, dstDevice)} <= _peers, "the copy passes through host memory"
    submit(lambda: ctypes.memmove(dst, src, size), stream=by_number(stream))


def deviceCanAccessPeer(device: int, peerDevice: int) -> bool:  # noqa: N802, N803
    return device != peerDevice


_peers: set[tuple[int, int]] = set()


def deviceEnablePeerAccess(peerDevice: int) -> None:  # noqa: N802, N803
    assert deviceCanAccessPeer(current(), peerDevice)
    if (current(), peerDevice) in _peers:
        raise CUDARuntimeError(704, "cudaErrorPeerAccessAlreadyEnabled")
    _peers.add((current(), peerDevice))


def deviceSynchronize() -> None:  # noqa: N802
    for queue in schedule._queues:
        queue.drain()


_registered: dict[int, range] = {}  # pages of 4 KiB, by address


def hostRegister(address: int, size: int, flags: int) -> None:  # noqa: N802
    assert size > 0
    assert flags & 1 or getDeviceCount() == 1, "for other GPUs this memory is pageable"
    if "SIMULATED_NO_PINNING" in os.environ:
        raise CUDARuntimeError(801, "cudaErrorNotSupported: operation not supported")
    pages = range(address >> 12, (address + size - 1 >> 12) + 1)
    if any(pages.start < other.stop and other.start < pages.stop for other in _registered.values()):
        raise CUDARuntimeError(712, "cudaErrorHostMemoryAlreadyRegistered")
    _registered[address] = pages


def hostUnregister(address: int) -> None:  # noqa: N802
    del _registered[address]
