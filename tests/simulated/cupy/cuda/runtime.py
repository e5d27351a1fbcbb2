from __future__ import annotations

import os

from . import current, memory

CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_16BF = 0, 1, 2, 14


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


_registered: set[int] = set()


def hostRegister(address: int, size: int, flags: int) -> None:  # noqa: N802
    assert size > 0 and flags == 0
    if address in _registered:
        raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered")
    _registered.add(address)


def hostUnregister(address: int) -> None:  # noqa: N802
    _registered.remove(address)
