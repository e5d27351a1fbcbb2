"""How the gradients of GPUs are summed over the workers: the ways there are, and which one a run takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from ...comm.hierarchy import Hierarchy
from ...core.layout import Array
from ...core.ranges import Bucket
from ...errors import ConfigError
from ..device import Gpu
from .cuda_aware import CudaAwareTransport
from .host import HostTransport
from .ipc import IpcTransport
from .nccl import NcclTransport
from .transport import GpuTransport, TransportUnavailable

_ROUNDS = 5  # of which the fastest counts; the first ones compile, connect and take memory


TRANSPORTS: dict[str, type[GpuTransport]] = {
    way.name: way for way in (NcclTransport, IpcTransport, CudaAwareTransport, HostTransport)
}


def select_transport(
    hierarchy: Hierarchy,
    gpu: Gpu,
    vector: Array,
    buckets: Sequence[Bucket],
    asked: str,
    before: str,
    say: Callable[[str], None],
) -> GpuTransport:
    """The way that is asked for; under ``auto`` the one that sums this vector in the least time. Collective.

    Args:
        vector: Zeros, which it still is afterwards.
        before: The way of the run that this one goes on from, which ``auto`` takes again: ways add in orders of their
            own, and a run that goes on is to be the one that was interrupted.

    Raises:
        ConfigError: On every worker: what is asked for is not there.
    """
    if asked == "auto" and before in TRANSPORTS:
        try:
            way = TRANSPORTS[before](hierarchy, gpu, vector, buckets)
        except TransportUnavailable:
            pass  # on every worker: this is another machine, and measured anew
        else:
            say(f"gradients travel by {before}, as before")
            return way
    ways, problems = {}, {}
    for name in TRANSPORTS if asked == "auto" else [asked]:
        try:
            ways[name] = TRANSPORTS[name](hierarchy, gpu, vector, buckets)
        except TransportUnavailable as error:
            problems[name] = str(error)
    if not ways:
        refusal = ConfigError(f"--gpu-transport {asked}: {problems[asked]}; give another way, or auto")
        refusal.on_all_ranks = True
        raise refusal
    if len(ways) == 1:
        name = next(iter(ways))
        reasons = "; ".join(f"{way}: {problem}" for way, problem in problems.items())
        say(f"gradients travel by {name}" + (f" ({reasons})" if reasons else ""))
        return ways[name]
    times = {name: _time(hierarchy, gpu, way, len(buckets)) for name, way in ways.items()}
    chosen = min(times, key=lambda name: times[name])
    for name, way in ways.items():
        if name != chosen:
            way.free()
    others = ", ".join(f"{name} {_told(seconds)}" for name, seconds in times.items() if name != chosen)
    say(f"gradients travel by {chosen}: {_told(times[chosen])} a sum ({others})")
    return ways[chosen]


def _time(hierarchy: Hierarchy, gpu: Gpu, way: GpuTransport, count: int) -> float:
    """Seconds for a sum, of the slowest worker in the fastest round; the same on all workers."""
    seconds = np.empty(_ROUNDS)
    for i in range(_ROUNDS):
        hierarchy.comm.Barrier()
        began = time.perf_counter()
        with gpu.activate():
            for index in range(count):
                way.start(index)
            way.finish()
            gpu.compute.wait()
        seconds[i] = time.perf_counter() - began
    everyone = np.empty((hierarchy.comm.size, _ROUNDS))
    hierarchy.comm.Allgather(seconds, everyone)
    return float(everyone.max(axis=0).min())


def _told(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"
