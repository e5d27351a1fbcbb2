"""The GPUs of every host, and their assignment to ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

from ..comm.cluster import Cluster
from ..gpu import nvml
from ..gpu.discovery import VisibleGpus, assign_gpus, describe, find_gpus
from ..monitor.format import size_of
from .finding import Finding

TOPIC = "GPU"
_TIMEOUT_S = 60
_NO_CUDNN = "convolutions use matrix products, which are slower"

_CUPY = "import cupy; print(cupy.__version__, cupy.is_available())"
_KERNELS = """
from mpitrain.gpu.device import Gpu
gpu = Gpu(0, 1)
with gpu.activate():
    gpu.compile("cast", "float")
"""
_CUDNN = """
import logging, sys
logging.disable()
from mpitrain.gpu.device import Gpu
if reason := Gpu(0, 1).why_no_cudnn:
    sys.exit(reason)
import cudnn
print(cudnn.backend_version_string())
"""
_NCCL = "from cupy.cuda import nccl; print(nccl.get_version())"
# This program sends device memory through MPI. An MPI library without CUDA support may crash it.
_CUDA_AWARE = """
import cupy, numpy
from mpi4py import MPI
data, back = cupy.arange(1024, dtype=cupy.float32), cupy.zeros(1024, dtype=cupy.float32)
cupy.cuda.get_current_stream().synchronize()
MPI.COMM_SELF.Sendrecv(data, dest=0, recvbuf=back, source=0)
assert bool((data == back).all())
"""


def check(cluster: Cluster) -> Iterator[Finding]:
    """Check the GPUs. Collective over all ranks; only rank 0 returns findings, which are printed."""
    local = (cluster.host, nvml.list_gpus(), nvml.is_installed()) if cluster.node.rank == 0 else None
    hosts = [host for host in cluster.comm.allgather(local) if host is not None]
    seen = VisibleGpus(cluster.node_of[cluster.rank], cluster.host, *find_gpus())
    all_ranks: list[VisibleGpus] = cluster.comm.allgather(seen)
    if cluster.rank > 0:
        return
    cupy = _cupy()
    if not any(cards for _, cards, _ in hosts) and not any(rank.gpus for rank in all_ranks):
        yield Finding(TOPIC, "devices", "none", "no NVIDIA driver answers on any host; ranks compute on the CPU")
        yield Finding(TOPIC, "CuPy", "none", cupy or "not installed")
        return
    for host, cards, installed in hosts:
        yield from _host(host, cards, installed, any(rank.gpus for rank in all_ranks if rank.host == host))
    if not cupy:
        advice = "pip install 'mpitrain[cuda12]' or 'mpitrain[cuda13]', according to the driver's CUDA version"
        yield Finding(TOPIC, "CuPy", "warning", "not installed; ranks compute on the CPU", advice)
        return
    yield Finding(TOPIC, "CuPy", "warning" if "does not import" in cupy else "pass", cupy)
    yield from _shares(all_ranks)
    if seen.gpus:
        yield _kernels()
        yield _cudnn()
    yield _nccl()
    yield _cuda_aware()


def _host(host: str, cards: list[nvml.GpuInfo], installed: bool, seen: bool) -> Iterator[Finding]:
    if not installed:
        advice = "pip install nvidia-ml-py"
        yield Finding(TOPIC, host, "warning", "memory, temperature and processes of devices are unknown", advice)
    elif not cards and seen:
        yield Finding(TOPIC, host, "warning", "CuPy finds a device, but NVML does not answer", "check nvidia-smi")
    elif not cards:
        yield Finding(TOPIC, host, "warning", "no device, unlike other hosts", "its ranks compute on the CPU")
    for index, card in enumerate(cards):
        degrees = "" if card.temperature is None else f", {card.temperature} C"
        free = f"{size_of(card.memory - card.used)} of {size_of(card.memory)} free"
        details = f"{card.name}, {free}{degrees}, driver {card.driver}"
        if card.users:
            details += f"; in use by {nvml.describe_processes(card.users)}"
        oversubscribed = card.used > card.memory // 2
        use_another = "other processes use this device; select another one with CUDA_VISIBLE_DEVICES"
        advice = use_another if oversubscribed else ""
        yield Finding(TOPIC, f"{host} device {index}", "warning" if oversubscribed else "pass", details, advice)


def _shares(all_ranks: list[VisibleGpus]) -> Iterator[Finding]:
    """Report the device that each rank would use in training."""
    shares = assign_gpus(all_ranks, 1, None)
    for host in dict.fromkeys(rank.host for rank in all_ranks):
        placements = []
        for rank, (seen, own) in enumerate(zip(all_ranks, shares, strict=True)):
            if seen.host == host:
                placements.append(f"{rank} on {f'gpu:{own[0].index}' if own else 'cpu'}")
        details = ", ".join(placements[:8]) + (" ..." if len(placements) > 8 else "")
        problems = [note for note in describe(all_ranks, shares) if host in note]
        if problems:
            yield Finding(TOPIC, f"{host} ranks", "warning", details, problems[0].removeprefix("warning: "))
        else:
            yield Finding(TOPIC, f"{host} ranks", "pass", details)


def _cupy() -> str:
    """Return CuPy's version and state; empty if it is not installed. Local."""
    if importlib.util.find_spec("cupy") is None:
        return ""
    status, output = _run(_CUPY)
    if status:
        return f"does not import: {output[:80]}"
    version, available = output.split()
    return f"{version}, {'finds a device' if available == 'True' else 'finds no device'}"


def _kernels() -> Finding:
    """Check that a kernel can be compiled for gpu:0. Local."""
    status, output = _run(_KERNELS)
    if status:
        details, _, advice = output.removeprefix("mpitrain.errors.DeviceError: ").partition("; reinstall CuPy: ")
        return Finding(TOPIC, "kernels", "failure", details, advice)
    return Finding(TOPIC, "kernels", "pass", "CuPy compiles them")


def _cudnn() -> Finding:
    """Check that gpu:0 computes convolutions with cuDNN. Local."""
    if importlib.util.find_spec("cudnn") is None:
        advice = "pip install 'mpitrain[cudnn13]', or cudnn12 with CUDA 12"
        return Finding(TOPIC, "cuDNN", "none", f"not installed; {_NO_CUDNN}", advice)
    status, output = _run(_CUDNN)
    if status:
        advice = "pip install --force-reinstall 'mpitrain[cudnn13]', or cudnn12 with CUDA 12"
        return Finding(TOPIC, "cuDNN", "warning", f"{output}; {_NO_CUDNN}", advice)
    return Finding(TOPIC, "cuDNN", "pass", f"version {output}")


def _nccl() -> Finding:
    """Check NCCL. Local."""
    status, output = _run(_NCCL)
    if status:
        details = "not installed; gradients are averaged through the host"
        return Finding(TOPIC, "NCCL", "warning", details, "pip install nvidia-nccl-cu13")
    return Finding(TOPIC, "NCCL", "pass", f"version {output}")


def _cuda_aware() -> Finding:
    """Check whether MPI accepts device memory. Local."""
    status, _ = _run(_CUDA_AWARE)
    if status == 0:
        return Finding(TOPIC, "CUDA-aware MPI", "pass", "MPI accepts device memory")
    how = f"signal {-status}" if status < 0 else "an error"
    return Finding(TOPIC, "CUDA-aware MPI", "none", f"no ({how}); device memory is copied through the host")


def _run(code: str) -> tuple[int, str]:
    """Run Python code in a child process, which may crash.

    Returns:
        The exit status, and the last line of standard output, or of standard error if the child failed.
    """
    # The child must not inherit the launcher's variables, because it runs MPI on its own.
    prefixes = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    words = [sys.executable, "-c", code]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {_TIMEOUT_S} s"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""
