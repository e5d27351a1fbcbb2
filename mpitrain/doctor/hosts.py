"""What differs between hosts: software, processors, network interfaces, memory, GPUs and their health."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ..comm.cluster import Cluster
from ..core.words import counted
from ..monitor.format import size_of
from .finding import Finding

TOPIC = "Hosts"
_PACKAGES = ("mpi4py", "numpy", "h5py", "numba", "torch", "cupy-cuda13x", "cupy-cuda12x")
_QUERY = (
    "name,driver_version,ecc.errors.uncorrected.volatile.total,pcie.link.width.current,pcie.link.width.max,"
    "clocks_throttle_reasons.hw_slowdown"
)
_TIMEOUT_S = 20.0


def check(cluster: Cluster) -> Iterator[Finding]:
    """Compare the hosts. Collective over all ranks; only rank 0's findings are printed."""
    cards = _cards() if cluster.node.rank == 0 else []
    local = (cluster.host, _facts(cards), _sick(cards)) if cluster.node.rank == 0 else None
    hosts = [each for each in cluster.comm.allgather(local) if each is not None]
    for host, _, problems in hosts:
        for problem in problems:
            yield Finding(TOPIC, f"host {host}", "warning", problem, "leave this host out, or have it serviced")
    if len(hosts) == 1:
        return
    names = list(dict.fromkeys(name for _, facts, _ in hosts for name in facts))
    differing = 0
    for name in names:
        values: dict[str, list[str]] = {}
        for host, facts, _ in hosts:
            values.setdefault(facts.get(name, "none"), []).append(host)
        if len(values) > 1:
            differing += 1
            common = max(values, key=lambda value: len(values[value]))
            others = [f"{value} on {', '.join(on)}" for value, on in values.items() if value != common]
            details = "; ".join([*others, f"{common} on the other {counted(len(values[common]), 'host')}"])
            yield Finding(TOPIC, name, "warning", details, "the slowest or oldest host limits a run")
    if not differing:
        yield Finding(TOPIC, "differences", "pass", f"none between {counted(len(hosts), 'host')}: {', '.join(names)}")


def _facts(cards: list[list[str]]) -> dict[str, str]:
    """Return facts of this host that should be equal on all hosts, by name."""
    facts = {"kernel": platform.release(), "cores": str(os.cpu_count()), "interfaces": _interfaces()}
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    facts["processor"] = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    facts["shared memory"] = size_of(shutil.disk_usage("/dev/shm").total)
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if cards:
        facts["GPUs"] = ", ".join(card[0] for card in cards)
        facts["GPU driver"] = cards[0][1]
    return facts


def _interfaces() -> str:
    """Return the network interfaces that are up, with their speeds."""
    found = []
    for folder in sorted(Path("/sys/class/net").iterdir()):
        try:
            if folder.name != "lo" and (folder / "operstate").read_text().strip() == "up":
                found.append(f"{folder.name} {int((folder / 'speed').read_text()):,} Mbit/s")
        except (OSError, ValueError):  # an interface without a speed
            found.append(folder.name)
    return ", ".join(found) or "none"


def _cards() -> list[list[str]]:
    """Return the values of ``_QUERY`` for each GPU of this host."""
    words = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(_QUERY.split(","))]


def _sick(cards: list[list[str]]) -> list[str]:
    """Return what is wrong with the GPUs of this host."""
    problems = []
    for number, (_, _, errors, width, widest, slowdown) in enumerate(cards):
        if errors.isdigit() and int(errors):
            problems.append(f"GPU {number} has {errors} uncorrected memory errors")
        if width.isdigit() and widest.isdigit() and int(width) < int(widest):
            problems.append(f"GPU {number} uses {width} of {widest} PCIe lanes")
        if slowdown == "Active":
            problems.append(f"GPU {number} is slowed down by its hardware, as when it is too hot")
    return problems
