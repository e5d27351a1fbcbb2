"""The GPUs of every host, and who would get which."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from ..cluster import Cluster
from ..monitor.console import size_of
from .finding import Finding

TOPIC = "GPU"
_MIB = 1 << 20

# Sends device memory through MPI; a library that is not made for it ends the process in a fault.
_PROBE = """
import cupy, numpy
from mpi4py import MPI
data, back = cupy.arange(1024, dtype=cupy.float32), cupy.zeros(1024, dtype=cupy.float32)
cupy.cuda.get_current_stream().synchronize()
MPI.COMM_SELF.Sendrecv(data, dest=0, recvbuf=back, source=0)
assert bool((data == back).all())
"""


class Gpu(NamedTuple):
    """A device, as its driver tells of it."""

    name: str
    memory: int
    used: int
    temperature: int
    driver: str


def check(cluster: Cluster) -> Iterator[Finding]:
    """Collective over all ranks; only rank 0's findings count."""
    mine = (cluster.host, devices(), cluster.node.size) if cluster.node.rank == 0 else None
    hosts = [host for host in cluster.comm.allgather(mine) if host is not None]
    cupy = _cupy()
    if not any(gpus for _, gpus, _ in hosts):
        yield Finding(TOPIC, "devices", "none", "no NVIDIA driver answers on any host: ranks compute on CPUs")
        yield Finding(TOPIC, "CuPy", "none", cupy or "not installed")
        return
    for host, gpus, ranks in hosts:
        yield from _host(host, gpus, ranks)
    if not cupy:
        mend = "pip install 'mpitrain[cuda12]' or 'mpitrain[cuda13]', by the driver's CUDA version"
        yield Finding(TOPIC, "CuPy", "warning", "not installed: ranks compute on CPUs", mend)
        return
    yield Finding(TOPIC, "CuPy", "pass", cupy)
    yield _nccl()
    yield _cuda_aware()


def devices() -> list[Gpu]:
    """This host's devices, as the driver lists them; none where there is no driver. Local."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    fields = "name,memory.total,memory.used,temperature.gpu,driver_version"
    words = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse(answer.stdout) if answer.returncode == 0 else []


def parse(answer: str) -> list[Gpu]:
    """The devices in the driver's answer, a line each."""
    found = []
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[1].isdigit():
            name, memory, used, temperature, driver = cells
            degrees = int(temperature) if temperature.isdigit() else 0
            found.append(Gpu(name, int(memory) * _MIB, int(used or 0) * _MIB, degrees, driver))
    return found


def visible(count: int, environ: str | None) -> list[int]:
    """Devices that CUDA_VISIBLE_DEVICES leaves of so many; those named by identifiers count on from 0."""
    if environ is None:
        return list(range(count))
    names = [name.strip() for name in environ.split(",") if name.strip() not in ("", "-1")]
    return [int(name) if name.isdigit() else i for i, name in enumerate(names)]


def _host(host: str, gpus: list[Gpu], ranks: int) -> Iterator[Finding]:
    if not gpus:
        yield Finding(TOPIC, host, "warning", "no device, and other hosts have some", "its ranks compute on CPUs")
        return
    for index, gpu in enumerate(gpus):
        told = f"{gpu.name}, {size_of(gpu.memory - gpu.used)} of {size_of(gpu.memory)} free, {gpu.temperature} C"
        if gpu.used > gpu.memory // 2:
            mend = "others use it: see nvidia-smi, or choose with CUDA_VISIBLE_DEVICES"
            yield Finding(TOPIC, f"{host} device {index}", "warning", told, mend)
        else:
            yield Finding(TOPIC, f"{host} device {index}", "pass", f"{told}, driver {gpu.driver}")
    usable = visible(len(gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if usable:
        shares = ", ".join(f"{rank} on {usable[rank % len(usable)]}" for rank in range(min(ranks, 8)))
        crowded = ranks > len(usable)
        mend = "ranks share devices: start one worker a device" if crowded else ""
        yield Finding(TOPIC, f"{host} local ranks", "warning" if crowded else "pass", shares, mend)
    else:
        yield Finding(TOPIC, f"{host} local ranks", "warning", "CUDA_VISIBLE_DEVICES hides every device", "unset it")


def _cupy() -> str:
    """CuPy's version, or nothing where it is not installed; local."""
    if importlib.util.find_spec("cupy") is None:
        return ""
    words = [sys.executable, "-c", "import cupy; print(cupy.__version__, cupy.is_available())"]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    if answer.returncode:
        return f"does not import: {answer.stderr.strip().splitlines()[-1][:80]}"
    version, available = answer.stdout.split()
    return f"{version}, {'sees a device' if available == 'True' else 'sees no device'}"


def _nccl() -> Finding:
    """Local."""
    words = [sys.executable, "-c", "from cupy.cuda import nccl; print(nccl.get_version())"]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    if answer.returncode:
        return Finding(
            TOPIC, "NCCL", "warning", "not there: GPUs average through the host", "pip install nvidia-nccl-cu13"
        )
    return Finding(TOPIC, "NCCL", "pass", f"version {answer.stdout.strip()}")


def _cuda_aware() -> Finding:
    """Whether MPI takes device memory, tried in a child process, so that a fault is an answer; local."""
    # Of the launcher nothing may be seen there: the child is a world of its own.
    prefixes = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        status = answer.returncode
    except subprocess.TimeoutExpired:
        status = 1
    if status == 0:
        return Finding(TOPIC, "CUDA-aware MPI", "pass", "MPI takes device memory")
    how = f"signal {-status}" if status < 0 else "an error"
    return Finding(TOPIC, "CUDA-aware MPI", "none", f"no ({how}): device memory goes through the host")
