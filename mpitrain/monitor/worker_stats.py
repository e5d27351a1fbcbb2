"""What each worker and each server has done, in the modes without a common pace: for metrics, tables and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .console import format_table, size_of

_ENOUGH = 50  # steps of the busiest worker before shares are compared


class Account(Protocol):
    """As a strategy keeps it for a worker."""

    @property
    def steps(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def staleness_sum(self) -> int: ...
    @property
    def staleness_max(self) -> int: ...
    @property
    def reads(self) -> int: ...
    @property
    def histogram(self) -> tuple[int, ...]: ...


def histogram(accounts: Sequence[Account]) -> list[int]:
    """Gradients of all workers by staleness; the last bin counts all from there on."""
    return [sum(counts) for counts in zip(*(account.histogram for account in accounts), strict=True)]


def moved(account: Account, nbytes: int) -> int:
    """Bytes of parameters read and of gradients handed in, in memory or over a network; of a vector of ``nbytes``."""
    return (account.reads + account.steps) * nbytes


def since(before: Sequence[Account], now: Sequence[Account], nbytes: int) -> dict[str, float]:
    """Staleness, gradients dropped and bytes moved between two readings of the accounts; empty where there are none."""
    steps = _sum(now, "steps") - _sum(before, "steps")
    if not steps:
        return {}
    counts = [b - a for a, b in zip(histogram(before), histogram(now), strict=True)]
    stalest = max((staleness for staleness, count in enumerate(counts) if count), default=0)
    if stalest == len(counts) - 1:
        stalest = max(account.staleness_max for account in now)
    values = {
        "staleness_mean": (_sum(now, "staleness_sum") - _sum(before, "staleness_sum")) / steps,
        "staleness_max": float(stalest),
        "moved_bytes": float(sum(moved(b, nbytes) - moved(a, nbytes) for a, b in zip(before, now, strict=True))),
    }
    dropped = _sum(now, "dropped") - _sum(before, "dropped")
    return {**values, "dropped": float(dropped)} if _sum(now, "dropped") else values


def unequal(before: Sequence[Account], now: Sequence[Account]) -> str:
    """A warning where a worker took less than half of another's share between two readings; else empty."""
    if len(now) < 2:
        return ""
    steps = [b.steps - a.steps for a, b in zip(before, now, strict=True)]
    least, most = min(steps), max(steps)
    if most < _ENOUGH or 2 * least >= most:
        return ""
    return (
        f"worker {steps.index(least)} has had {least:,} gradients taken, less than half of worker "
        f"{steps.index(most)}'s {most:,}: look for what slows it (ranks.txt names its host)"
    )


def as_json(accounts: Sequence[Account], batch: int, nbytes: int, seconds: float) -> dict[str, Any]:
    """The accounts at the end, for ``metrics.jsonl``."""
    workers = [
        {
            "worker": worker,
            "steps": account.steps,
            "examples_per_s": account.steps * batch / seconds,
            "staleness_mean": _mean_staleness(account),
            "staleness_max": account.staleness_max,
            "dropped": account.dropped,
            "moved_bytes": moved(account, nbytes),
        }
        for worker, account in enumerate(accounts)
    ]
    return {"workers": workers, "staleness_histogram": histogram(accounts)}


def table(accounts: Sequence[Account], hosts: Sequence[str], batch: int, nbytes: int, seconds: float) -> str:
    """Each worker's account, and how stale gradients were."""
    titles = ("worker", "host", "taken", "examples/s", "staleness", "at most", "dropped", "moved")
    rows = [
        (
            str(worker),
            host,
            f"{account.steps:,}",
            f"{account.steps * batch / seconds:,.0f}",
            f"{_mean_staleness(account):.2f}",
            str(account.staleness_max),
            f"{account.dropped:,}",
            size_of(moved(account, nbytes)),
        )
        for worker, (account, host) in enumerate(zip(accounts, hosts, strict=True))
    ]
    return format_table(titles, rows) + "\n" + _histogram_line(histogram(accounts))


def server_table(hosts: Sequence[str], nbytes: Sequence[int], accounts: Sequence[Account]) -> str:
    """Each server's part of the vector, in bytes, and what workers have handed in to it and read from it."""
    gradients, reads = _sum(accounts, "steps"), _sum(accounts, "reads")
    titles = ("server", "host", "holds", "gradients", "received", "given out")
    rows = [
        (str(server), host, size_of(held), f"{gradients:,}", size_of(held * gradients), size_of(held * reads))
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
    return f"staleness of gradients  {'  '.join(shown)}"


def _mean_staleness(account: Account) -> float:
    return account.staleness_sum / account.steps if account.steps else 0.0


def _sum(accounts: Sequence[Account], name: str) -> int:
    return sum(getattr(account, name) for account in accounts)
