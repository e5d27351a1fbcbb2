"""Select the transport that sums GPU gradients over the workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from ...comm.hierarchy import Hierarchy
from ...core.layout import Array
from ...core.ranges import Bucket
from ...errors import ConfigError
from ..device import Gpu
from .cuda_aware import CudaAwareTransport
from .host import HostTransport
from .nccl import NcclTransport
from .transport import GpuTransport, TransportUnavailable

_log = logging.getLogger(__name__)
_ROUNDS = 5  # number of rounds; the fastest counts, because the first rounds compile, connect and allocate memory


TRANSPORTS: dict[str, type[GpuTransport]] = {
    transport.name: transport for transport in (NcclTransport, CudaAwareTransport, HostTransport)
}


def select_transport(
    hierarchy: Hierarchy,
    gpu: Gpu,
    vectors: Sequence[Array],
    buckets: Sequence[Bucket],
    leaves: int | None,
    requested: str,
    previous: str,
) -> GpuTransport:
    """Return the requested transport; for ``auto`` the fastest one for these vectors. Collective over the workers.

    Args:
        vectors: Zeros, before and after the call.
        leaves: As for ``GpuTransport``.
        previous: Transport of the resumed run, which may no longer exist, or an empty string. Without virtual workers,
            ``auto`` reuses it: each transport sums in a different order, and a resumed run should give the same result
            as an uninterrupted run.

    Raises:
        ConfigError: On every worker: the requested transport is not available.
    """
    if requested == "auto" and leaves is None and previous in TRANSPORTS:
        try:
            transport = TRANSPORTS[previous](hierarchy, gpu, vectors, buckets, leaves)
        except TransportUnavailable:
            pass  # on every worker: the resumed run used another machine, so measure again
        else:
            _log.info("GPU transport: %s, the same as in the resumed run", previous)
            return transport
    transports, problems = {}, {}
    for name in TRANSPORTS if requested == "auto" else [requested]:
        try:
            transports[name] = TRANSPORTS[name](hierarchy, gpu, vectors, buckets, leaves)
        except TransportUnavailable as error:
            problems[name] = str(error)
    if not transports:
        raise ConfigError(
            f"--gpu-transport {requested}: {problems[requested]}; use another transport or auto", on_all_ranks=True
        )
    if len(transports) == 1:
        name = next(iter(transports))
        reasons = "; ".join(f"{other}: {problem}" for other, problem in problems.items())
        _log.info("GPU transport: %s%s", name, f" ({reasons})" if reasons else "")
        return transports[name]
    times = {name: _time(hierarchy, gpu, transport, len(buckets)) for name, transport in transports.items()}
    chosen = min(times, key=lambda name: times[name])
    for name, transport in transports.items():
        if name != chosen:
            transport.free()
    others = ", ".join(f"{name} {_format(seconds)}" for name, seconds in times.items() if name != chosen)
    _log.info("GPU transport: %s %s per sum (%s)", chosen, _format(times[chosen]), others)
    return transports[chosen]


def _time(hierarchy: Hierarchy, gpu: Gpu, transport: GpuTransport, count: int) -> float:
    """Return the seconds per sum, of the slowest worker in the fastest round; the same on all workers."""
    seconds = np.empty(_ROUNDS)
    for i in range(_ROUNDS):
        hierarchy.comm.Barrier()
        began = time.perf_counter()
        with gpu.activate():
            for index in range(count):
                transport.start(index)
            transport.finish()
            gpu.compute.wait()
        seconds[i] = time.perf_counter() - began
    all_workers = np.empty((hierarchy.comm.size, _ROUNDS))
    hierarchy.comm.Allgather(seconds, all_workers)
    return float(all_workers.max(axis=0).min())


def _format(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"
