"""Information about GPUs from their driver, through NVML. Requires neither CUDA nor CuPy."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, NamedTuple


class GpuProcess(NamedTuple):
    """A process that uses a GPU.

    Attributes:
        nbytes: GPU memory in use by the process; None if unknown, as in containers.
    """

    pid: int
    name: str
    nbytes: int | None


class GpuInfo(NamedTuple):
    """A GPU.

    Attributes:
        identifier: CUDA's identifier of the device, in hexadecimal digits.
        memory, used: Total and used bytes, by all processes.
        temperature: Degrees Celsius; None if unknown.
        users: Processes other than this one.
    """

    identifier: str
    name: str
    memory: int
    used: int
    temperature: int | None
    driver: str
    users: list[GpuProcess]


def is_installed() -> bool:
    """Return whether the NVML bindings (nvidia-ml-py) are installed."""
    try:
        import pynvml  # noqa: F401
    except ImportError:
        return False
    return True


def list_gpus() -> list[GpuInfo]:
    """Return all GPUs of this host, regardless of CUDA_VISIBLE_DEVICES; empty if NVML is not available. Local."""
    if not is_installed():
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_gpu_info(pynvml, handle, driver) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _gpu_info(nvml: Any, handle: Any, driver: str) -> GpuInfo:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    temperature, users = None, []
    with suppress(nvml.NVMLError):
        temperature = int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    with suppress(nvml.NVMLError):
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        users = [_process(nvml, process) for process in processes if process.pid != os.getpid()]
    identifier = _text(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-").replace("-", "")
    name = _text(nvml.nvmlDeviceGetName(handle))
    return GpuInfo(identifier, name, int(memory.total), int(memory.used), temperature, driver, users)


def _process(nvml: Any, process: Any) -> GpuProcess:
    name = ""
    with suppress(nvml.NVMLError):
        name = os.path.basename(_text(nvml.nvmlSystemGetProcessName(process.pid)))
    return GpuProcess(process.pid, name, process.usedGpuMemory)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def describe_processes(users: list[GpuProcess]) -> str:
    """Return a text such as ``python (pid 4711, 12.0 GiB)``."""
    some = []
    for pid, name, nbytes in users[:4]:
        size = "" if nbytes is None else f", {nbytes / 2**30:.1f} GiB"
        some.append(f"{name or 'process'} (pid {pid}{size})")
    return ", ".join(some) + (f" and {len(users) - 4} more" if len(users) > 4 else "")
