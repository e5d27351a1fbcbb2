"""The ranks and their environment: MPI library, launcher, hosts, cores, binding, clocks."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from threadpoolctl import threadpool_info

from ..comm.clock_sync import measure_wall
from ..comm.cluster import Cluster
from ..comm.mpi import MPI, library_name
from ..core.cpus import Binding, crowded, own_cores
from ..core.host_memory import available_bytes
from ..core.openblas import CHOSEN
from ..core.words import counted
from ..errors import LaunchError
from ..launcher.mpi_flavors import find_launcher
from ..monitor.format import size_of
from ..version import __version__
from .finding import Finding

TOPIC = "Ranks"
_SKEW_S = 1.0  # users compare file times, time limits and logs of hosts to the second
_FILES = 1024
_OF_BLAS = ("internal_api", "version", "architecture")
# Prints the kernels that OpenBLAS selects in a new process.
_ASK_BLAS = """
import mpitrain.core.openblas, numpy, threadpoolctl
for library in threadpoolctl.threadpool_info():
    if library["internal_api"] == "openblas":
        print(library["architecture"], end="")
        break
"""


def check(cluster: Cluster) -> Iterator[Finding]:
    """Check the ranks. Collective over all ranks; only rank 0's findings are printed."""
    yield _versions(cluster)
    yield _launcher()
    yield _threads()
    yield _blas()
    yield from _hosts(cluster)
    yield _binding(cluster)
    yield _clocks(cluster)
    yield _limits(cluster)
    yield _fault_tolerance()


def not_started(error: LaunchError) -> Finding:
    """Return the finding for a launcher whose ranks do not form one world."""
    return Finding(TOPIC, "world", "failure", "the launcher's ranks do not see each other", str(error))


def _versions(cluster: Cluster) -> Finding:
    local = f"{library_name()}, Python {platform.python_version()}, mpitrain {__version__}"
    counts = Counter(cluster.comm.allgather(local))
    if len(counts) == 1:
        ranks = counted(cluster.size, "rank")
        return Finding(TOPIC, "versions", "pass", f"{local}, on {ranks}")
    details = "; ".join(f"{count} with {versions}" for versions, count in counts.most_common())
    return Finding(TOPIC, "versions", "failure", details, "install the same versions on every host")


def _launcher() -> Finding:
    """Check the launcher. Local."""
    try:
        launcher = find_launcher()
    except LaunchError as error:
        return Finding(TOPIC, "mpirun", "failure", "none for the MPI library", str(error))
    return Finding(TOPIC, "mpirun", "pass", launcher.program)


def _threads() -> Finding:
    """Check the thread level. Local."""
    names = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    level = MPI.Query_thread()
    if level >= MPI.THREAD_FUNNELED:
        return Finding(TOPIC, "MPI threads", "pass", names[level])
    advice = "mpitrain reads and writes files in threads; use an MPI library built with thread support"
    return Finding(TOPIC, "MPI threads", "failure", names[level], advice)


def _blas() -> Finding:
    """Check which matrix kernels this host uses, and whether the environment selects slower ones. Local."""
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    loaded = ", ".join(" ".join(str(of.get(key, "")) for key in _OF_BLAS).strip() for of in libraries)
    if not libraries:
        return Finding(TOPIC, "matrix kernels", "none", "NumPy's BLAS does not report its version")
    chosen = os.environ.get("OPENBLAS_CORETYPE", "")
    if not chosen or "OPENBLAS_CORETYPE" in CHOSEN:
        return Finding(TOPIC, "matrix kernels", "pass", loaded)
    free = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    own = subprocess.run([sys.executable, "-c", _ASK_BLAS], env=free, capture_output=True, text=True, check=False)
    if not own.stdout or own.stdout in loaded:
        return Finding(TOPIC, "matrix kernels", "pass", loaded)
    advice = "unset OPENBLAS_CORETYPE, unless it is set on purpose: on some CPUs it costs a third of the speed"
    details = f"{loaded}, because OPENBLAS_CORETYPE={chosen} is set; the default here is {own.stdout}"
    return Finding(TOPIC, "matrix kernels", "warning", details, advice)


def _hosts(cluster: Cluster) -> Iterator[Finding]:
    leader = cluster.node.rank == 0
    local = (cluster.host, cluster.node.size, cluster.cores, os.cpu_count() or 0, available_bytes()) if leader else None
    nodes = [node for node in cluster.comm.allgather(local) if node is not None]
    for host, ranks, usable, cores, free in nodes:
        of = f"{usable} of {cores}" if usable < cores else f"{cores}"
        details = f"{counted(ranks, 'rank')}, {of} cores, {size_of(free)} of memory free"
        if ranks > usable:
            advice = f"this works but is slow; start {usable} ranks on this host, or request more cores"
            yield Finding(TOPIC, f"host {host}", "warning", f"{details}: more ranks than cores", advice)
        else:
            yield Finding(TOPIC, f"host {host}", "pass", details)
    names = Counter(host for host, *_ in nodes)
    for host, count in names.items():
        if count > 1:
            advice = "ranks of one host do not share memory; give their containers the same /dev/shm and IPC namespace"
            yield Finding(TOPIC, "host names", "warning", f"{count} nodes have the host name {host}", advice)


def _binding(cluster: Cluster) -> Finding:
    """Check that ranks are not bound to the same cores while other cores are free, which slows them down silently."""
    own = Binding(tuple(own_cores()), (), os.cpu_count() or 1)
    hosts, bindings = zip(*cluster.comm.allgather((cluster.host, own)), strict=True)
    if problems := crowded(hosts, bindings):
        advice = "pass --bind-to none (Open MPI), -bind-to none (MPICH) or --cpu-bind=cores (srun), or use mpitrain run"
        return Finding(TOPIC, "binding", "failure", "; ".join(problems[:4]), advice)
    each = sorted({len(binding.cores) for binding in bindings})
    cores = f"{each[0]}" if len(each) == 1 else f"{each[0]} to {each[-1]}"
    return Finding(TOPIC, "binding", "pass", f"each rank may use {cores} core{'s' * (each[-1] != 1)} of its host")


def _clocks(cluster: Cluster) -> Finding:
    skew_s, uncertain_s = measure_wall(cluster.comm)
    hosts = cluster.comm.allgather((abs(skew_s), uncertain_s, cluster.host))
    worst, uncertain, host = max(hosts)
    if cluster.n_nodes == 1:
        return Finding(TOPIC, "clocks", "none", "one host")
    details = f"{host} differs by {worst * 1e3:.3g} ms (± {uncertain * 1e3:.2g} ms)"
    if worst < _SKEW_S:
        return Finding(TOPIC, "clocks", "pass", details)
    return Finding(
        TOPIC, "clocks", "warning", details, "run an NTP client on every host to make times in logs comparable"
    )


def _limits(cluster: Cluster) -> Finding:
    files, locked = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    least = min(cluster.comm.allgather(files if files >= 0 else 1 << 60))
    memory = "unlimited" if locked < 0 else size_of(locked)
    details = f"{'unlimited' if least >= 1 << 60 else format(least, ',')} open files, {memory} locked memory"
    if least < _FILES:
        return Finding(TOPIC, "limits", "warning", details, f"run ulimit -n {_FILES} before starting")
    return Finding(TOPIC, "limits", "pass", details)


def _fault_tolerance() -> Finding:
    """Check whether the MPI library can survive a rank's death; training restarts instead. Local."""
    support = "a rank's death ends the run"
    program = Path(sys.prefix) / "bin" / "ompi_info"
    if "Open MPI" in library_name() and program.exists():
        answer = subprocess.run([program, "--parsable"], capture_output=True, text=True, timeout=30, check=False)
        if re.search(r"^option:ft_mpi_support:yes|FT MPI support: yes", answer.stdout, re.MULTILINE):
            support = "the library has ULFM, off by default"
    return Finding(
        TOPIC, "fault tolerance", "pass", f"{support}; mpitrain run --max-restarts N restarts it from its newest state"
    )
