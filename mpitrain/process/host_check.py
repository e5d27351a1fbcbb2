"""Check a host before ranks are started on it again; run on the host as a script.

    host_check.py NOW [HOST]

NOW is the time of the host that asks, in seconds since the epoch. HOST is the name of a host that has failed twice. If
the host should not be used, the reason is the last line on standard error, and the exit status is 1. Only Python's
standard library is required; GPUs are checked with nvidia-ml-py.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

_LEAST_DISK_BYTES = 50 << 20
_LEAST_MEMORY = 0.02  # share of the host's memory
_MOST_CLOCK_S = 60.0
_GPU_S = 5.0  # a driver may take longer to start, which is not the fault of a GPU


def problem(now: float, failed: str = "") -> str:
    """Return why the host should not be used; empty if it may be.

    Args:
        now: The time of the host that asks.
        failed: The name of a host on which ranks were killed in two attempts of the run, and on no other host.
    """
    if socket.gethostname() == failed:
        return "a signal has killed ranks on it in two attempts, and on no other host"
    folder, memory = tempfile.gettempdir(), _memory()
    if (free := shutil.disk_usage(folder).free) < _LEAST_DISK_BYTES:
        return f"its temporary directory {folder} has {free >> 20} MiB left"
    if memory and memory["MemAvailable"] < _LEAST_MEMORY * memory["MemTotal"]:
        return f"it has {memory['MemAvailable'] >> 10} MiB of free memory"
    if abs(ahead_s := time.time() - now) > _MOST_CLOCK_S:
        return f"its clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
    of_gpus: list[str] = []
    thread = threading.Thread(target=lambda: of_gpus.append(_gpu_problem()), daemon=True)
    thread.start()
    thread.join(_GPU_S)
    return "".join(of_gpus)


def _gpu_problem() -> str:
    """Return what is wrong with a GPU of this host; empty if nothing is known, such as without nvidia-ml-py."""
    try:
        import pynvml as nvml
    except ImportError:
        return ""
    gpus, kind = range(0), nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    with contextlib.suppress(nvml.NVMLError):  # such as no driver
        nvml.nvmlInit()
        gpus = range(nvml.nvmlDeviceGetCount())
    for index in gpus:
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            count = nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC)
        except nvml.NVMLError_GpuIsLost:
            return f"its GPU {index} is lost"
        except nvml.NVMLError:  # such as a GPU without error correction
            continue
        if count:
            return f"its GPU {index} has had {count} uncorrected memory errors since its driver was loaded"
    return ""


def _memory() -> dict[str, int]:
    """Return the sizes in KiB in /proc/meminfo; none if it does not exist."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


if __name__ == "__main__":
    sys.exit(problem(float(sys.argv[1]), *sys.argv[2:]) or 0)
