"""Statistics of each worker and server in the modes with servers: for metrics, tables and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from .format import format_table, size_of

# The number of bytes of a gradient that a worker submits to a server, by worker and server.
GradientBytes: TypeAlias = Sequence[Sequence[int]]

_ENOUGH = 50  # minimum number of gradients of the busiest worker before workers are compared


class WorkerStats(NamedTuple):
    """Statistics of one worker since the run began.

    Attributes:
        steps: Number of the worker's gradients that were used.
        dropped: Number of the worker's gradients that came too late.
        staleness_sum, staleness_max: Sum and maximum of the staleness of the used gradients.
        reads: Number of times that the worker read the parameters, for gradients or otherwise.
        histogram: Numbers of gradients by staleness; the last bin also counts all higher values.
    """

    steps: int
    dropped: int
    staleness_sum: int
    staleness_max: int
    reads: int
    histogram: tuple[int, ...]


def histogram(workers: Sequence[WorkerStats]) -> list[int]:
    """Return the numbers of all workers' gradients by staleness; the last bin also counts all higher values."""
    return [sum(counts) for counts in zip(*(stats.histogram for stats in workers), strict=True)]


def moved(workers: Sequence[WorkerStats], nbytes: int, gradient_nbytes: GradientBytes) -> list[int]:
    """Return the bytes of parameters read and gradients submitted by each worker, in memory or over a network.

    Args:
        nbytes: Bytes of all parameters.
        gradient_nbytes: Empty if a gradient has the same number of bytes as the parameters.
    """
    sizes = [sum(of_servers) for of_servers in gradient_nbytes] or [nbytes] * len(workers)
    return [stats.reads * nbytes + stats.steps * size for stats, size in zip(workers, sizes, strict=True)]


def since(
    before: Sequence[WorkerStats], now: Sequence[WorkerStats], nbytes: int, gradient_nbytes: GradientBytes
) -> dict[str, float]:
    """Return staleness, dropped gradients and transferred bytes between two readings; empty without steps."""
    steps = _sum(now, "steps") - _sum(before, "steps")
    if not steps:
        return {}
    counts = [b - a for a, b in zip(histogram(before), histogram(now), strict=True)]
    stalest = max((staleness for staleness, count in enumerate(counts) if count), default=0)
    if stalest == len(counts) - 1:
        stalest = max(stats.staleness_max for stats in now)
    values = {
        "staleness_mean": (_sum(now, "staleness_sum") - _sum(before, "staleness_sum")) / steps,
        "staleness_max": float(stalest),
        "moved_bytes": float(sum(moved(now, nbytes, gradient_nbytes)) - sum(moved(before, nbytes, gradient_nbytes))),
    }
    dropped = _sum(now, "dropped") - _sum(before, "dropped")
    return {**values, "dropped": float(dropped)} if _sum(now, "dropped") else values


def uneven_speed_warning(before: Sequence[WorkerStats], now: Sequence[WorkerStats]) -> str:
    """Return a warning if a worker contributed less than half as much as another between two readings; else empty."""
    if len(now) < 2:
        return ""
    steps = [b.steps - a.steps for a, b in zip(before, now, strict=True)]
    least, most = min(steps), max(steps)
    if most < _ENOUGH or 2 * least >= most:
        return ""
    return (
        f"worker {steps.index(least)} contributed {least:,} gradients, less than half of worker "
        f"{steps.index(most)}'s {most:,}; check what slows it down (ranks.txt lists its host)"
    )


def as_json(workers: Sequence[WorkerStats], batch: int, moved_bytes: Sequence[int], seconds: float) -> dict[str, Any]:
    """Return the final statistics for ``metrics.jsonl``."""
    rows = [
        {
            "worker": worker,
            "steps": stats.steps,
            "examples_per_s": stats.steps * batch / seconds,
            "staleness_mean": _mean_staleness(stats),
            "staleness_max": stats.staleness_max,
            "dropped": stats.dropped,
            "moved_bytes": nbytes,
        }
        for worker, (stats, nbytes) in enumerate(zip(workers, moved_bytes, strict=True))
    ]
    return {"workers": rows, "staleness_histogram": histogram(workers)}


def table(
    workers: Sequence[WorkerStats], hosts: Sequence[str], batch: int, moved_bytes: Sequence[int], seconds: float
) -> str:
    """Return a table of the workers' statistics and a line on the staleness of gradients."""
    titles = ("worker", "host", "gradients", "examples/s", "staleness", "max", "dropped", "transferred")
    rows = [
        (
            str(worker),
            host,
            f"{stats.steps:,}",
            f"{stats.steps * batch / seconds:,.0f}",
            f"{_mean_staleness(stats):.2f}",
            str(stats.staleness_max),
            f"{stats.dropped:,}",
            size_of(nbytes),
        )
        for worker, (stats, host, nbytes) in enumerate(zip(workers, hosts, moved_bytes, strict=True))
    ]
    return format_table(titles, rows) + "\n" + _histogram_line(histogram(workers))


def server_table(
    hosts: Sequence[str], nbytes: Sequence[int], workers: Sequence[WorkerStats], gradient_nbytes: GradientBytes
) -> str:
    """Return a table of the servers: bytes held, and bytes received from and sent to workers.

    Args:
        nbytes: Bytes of the parameters that each server holds.
    """
    gradients, reads = _sum(workers, "steps"), _sum(workers, "reads")
    titles = ("server", "host", "holds", "gradients", "received", "sent")
    received = [
        sum(stats.steps * of_servers[server] for stats, of_servers in zip(workers, gradient_nbytes, strict=True))
        for server in range(len(hosts))
    ]
    rows = [
        (str(server), host, size_of(held), f"{gradients:,}", size_of(received[server]), size_of(held * reads))
        for server, (host, held) in enumerate(zip(hosts, nbytes, strict=True))
    ]
    return format_table(titles, rows)


def _histogram_line(counts: Sequence[int]) -> str:
    total = sum(counts)
    last = len(counts) - 1
    shown = [
        f"{staleness}{'+' if staleness == last else ''}: {100 * count / total:.0f} %"
        for staleness, count in enumerate(counts)
        if total and 100 * count >= total
    ]
    return f"staleness  {'  '.join(shown)}"


def _mean_staleness(stats: WorkerStats) -> float:
    return stats.staleness_sum / stats.steps if stats.steps else 0.0


def _sum(workers: Sequence[WorkerStats], name: str) -> int:
    return sum(getattr(stats, name) for stats in workers)
