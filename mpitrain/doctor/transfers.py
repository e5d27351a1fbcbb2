"""Transfers between ranks: shared memory, windows, messages, their speed and size."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from ..comm.cluster import Cluster
from ..comm.mpi import MPI
from ..comm.shared_memory import sharing_problem
from ..core.host_memory import available_bytes
from ..monitor.format import size_of
from ..probe.transfers import one_way_s
from .finding import Finding

TOPIC = "Transfers"
_SHARED_BYTES = 64 << 20
_MESSAGE_BYTES = 4 << 20
_LARGE_BYTES = (1 << 31) + 8  # more bytes than a C int can count, but fewer elements of 4 bytes
_LARGE_S = 15.0
_SENT = 1  # tag of the message that follows a large message
_AWAY_S = 0.4


def check(cluster: Cluster) -> Iterator[Finding]:
    """Check transfers. Collective over all ranks; only rank 0's findings are printed."""
    yield _shared(cluster)
    partners = _partners(cluster)
    if not partners:
        yield Finding(TOPIC, "messages", "none", "not tested with one rank; start two or more")
        return
    rates = {}
    for where, rank in partners.items():
        latency_s, rates[where] = _ping_pong(cluster, rank)
        details = f"{latency_s * 1e6:.1f} us, {rates[where] / 1e9:.2f} GB/s"
        yield Finding(TOPIC, where, "pass", details)
    for where, rank in partners.items():
        yield _windows(cluster, where, rank)
    yield _large(cluster, *list(partners.items())[-1], min(rates.values()))


def _partners(cluster: Cluster) -> dict[str, int]:
    """Return rank 0's test partners: another rank on its host, and the first rank on each of up to 3 other hosts."""
    targets = {}
    local = [rank for rank in range(1, cluster.size) if cluster.node_of[rank] == 0]
    if local:
        targets["within a host"] = local[0]
    for leader in sorted(set(cluster.node_of) - {0})[:3]:
        targets[f"to {cluster.host_of[leader]}"] = leader
    return targets


def _shared(cluster: Cluster) -> Finding:
    problem = sharing_problem(cluster.node, _SHARED_BYTES)
    problems = [(host, text) for host, text in cluster.comm.allgather((cluster.host, problem)) if text]
    if problems:
        host, text = problems[0]
        advice = "enlarge /dev/shm (docker run --shm-size), or train with --no-shared-memory, which is slower"
        return Finding(TOPIC, "shared memory", "failure", f"{host}: {text}", advice)
    if cluster.size == cluster.n_nodes:
        return Finding(TOPIC, "shared memory", "none", "one rank per host; not needed")
    return Finding(TOPIC, "shared memory", "pass", f"ranks of a host share windows of {size_of(_SHARED_BYTES)}")


def _ping_pong(cluster: Cluster, partner: int) -> tuple[float, float]:
    """Return latency in seconds (8 bytes, one way) and bandwidth in bytes/s (4 MiB). Collective over all ranks."""
    comm, measured = cluster.comm, (0.0, 1.0)
    if comm.rank in (0, partner):
        other = partner if comm.rank == 0 else 0
        latency_s = one_way_s(comm, other, np.zeros(1), 100)
        measured = latency_s, _MESSAGE_BYTES / one_way_s(comm, other, np.zeros(_MESSAGE_BYTES, np.uint8), 5)
    return comm.bcast(measured, root=0)


def _windows(cluster: Cluster, where: str, partner: int) -> Finding:
    """Check whether one-sided transfers complete while their target computes outside MPI. Collective."""
    comm, seconds, wrong = cluster.comm, 0.0, False
    check = f"windows {where}" if where.startswith("to") else "windows within a host"
    problem = ""
    try:
        window = MPI.Win.Allocate(8, 1, MPI.INFO_NULL, comm)
    except MPI.Exception as error:
        problem = str(error)
    problem = next(filter(None, comm.allgather(problem)), "")
    if problem:  # a window that exists only on some ranks cannot be freed
        return Finding(TOPIC, check, "warning", f"none: {problem}", "servers use messages instead (--no-one-sided)")
    window.tomemory()[:] = bytes(8)
    comm.Barrier()
    if comm.rank == 0:
        before, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        time.sleep(_AWAY_S / 8)  # by now the target has left MPI
        began = time.perf_counter()
        window.Lock(partner, MPI.LOCK_SHARED)
        window.Fetch_and_op(one, before, partner)
        window.Unlock(partner)
        seconds, wrong = time.perf_counter() - began, bool(before[0])
    elif comm.rank == partner:
        time.sleep(_AWAY_S)
    comm.Barrier()
    window.Free()
    if wrong:
        return Finding(TOPIC, check, "failure", "Fetch_and_op returned a wrong value", "train with --no-one-sided")
    details = f"one word in {seconds * 1e3:.2g} ms while the target computed outside MPI"
    if seconds < _AWAY_S / 2:
        return Finding(TOPIC, check, "pass", details)
    why = "transfers wait for the target; servers are not affected, because they stay in MPI"
    return Finding(TOPIC, check, "pass", f"{details}: {why}")


def _large(cluster: Cluster, where: str, partner: int, rate: float) -> Finding:
    """Check whether a message of more than 2 GiB arrives. Collective over all ranks."""
    comm, check = cluster.comm, "over 2 GiB"
    free = min(comm.allgather(available_bytes()))
    if free < 3 * _LARGE_BYTES:
        return Finding(TOPIC, check, "none", f"not tested: requires 6 GiB of free memory, {size_of(free)} is free")
    if _LARGE_BYTES / rate > _LARGE_S:
        return Finding(TOPIC, check, "none", f"not tested: it would take {_LARGE_BYTES / rate:.0f} s")
    began, problem = time.perf_counter(), ""
    if comm.rank == 0:
        problem = _send_large(comm, partner)
    elif comm.rank == partner:
        problem = _receive_large(comm)
    seconds = time.perf_counter() - began
    problem = next(filter(None, comm.allgather(problem)), "")
    if problem:
        advice = "parameters of more than 2 GiB cannot be sent between hosts; try another version of the MPI library"
        return Finding(TOPIC, check, "warning", problem, advice)
    return Finding(TOPIC, check, "pass", f"{where}, 2 GiB in {seconds:.1f} s")


def _send_large(comm: MPI.Intracomm, partner: int) -> str:
    """Send the message; return an error, or an empty string."""
    data, problem = np.zeros(_LARGE_BYTES // 4, np.float32), ""
    data[-1] = 7
    try:
        comm.Send(data, dest=partner)
    except MPI.Exception as error:
        problem = str(error)
    comm.send(problem, dest=partner, tag=_SENT)
    return problem


def _receive_large(comm: MPI.Intracomm) -> str:
    """Receive the message. Return this rank's error; an empty string if there is none, or if the sender failed."""
    data = np.empty(_LARGE_BYTES // 4, np.float32)
    try:
        request = comm.Irecv(data, source=0, tag=0)
        failed = comm.recv(source=0, tag=_SENT)
        if failed:
            request.Cancel()
        request.Wait()
    except MPI.Exception as error:
        return str(error)
    return "" if failed or (data[-1] == 7 and data[0] == 0) else "it arrived damaged"
