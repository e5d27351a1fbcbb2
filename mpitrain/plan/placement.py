"""Distribute the flat vector over the servers: round-robin, greedy by bytes, or every variable partitioned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..core.layout import ALIGN, Entry, Layout, Shape
from ..errors import JobError

Policy = Literal["round_robin", "greedy", "partitioned"]
Pins = Mapping[str, int] | Callable[[str, Shape, int], "int | None"]


@dataclass(frozen=True)
class Placement:
    """A range of one variable, on one server.

    Attributes:
        entry: The variable.
        start, stop: The range [start, stop) of the flat vector.
        server: Task index of the server that holds it.
    """

    entry: Entry
    start: int
    stop: int
    server: int


def assign_servers(
    layout: Layout, servers: int, policy: Policy, itemsize: int, pins: Pins | None = None
) -> list[Placement]:
    """Distribute the variables over the servers; every element is on exactly one server.

    - ``round_robin`` assigns variables in the order of the vector.
    - ``greedy`` assigns the largest remaining variable to the server with the fewest bytes (longest processing time
      first, Graham 1969).
    - ``partitioned`` splits every variable into a range for each server, a small variable into fewer ranges.

    A pinned variable is placed unsplit on its server; ``greedy`` counts its bytes.

    Args:
        itemsize: Bytes of an element.
        pins: Server of a variable by name; or a function of name, shape and bytes that returns the server, or None.

    Raises:
        JobError: A variable is pinned to a server that does not exist, or a pinned name is not in the model.
    """
    pinned = _pinned(layout, servers, itemsize, pins)
    if policy == "partitioned":
        free = [part for entry in layout.entries if entry.name not in pinned for part in _cut(entry, servers)]
    else:
        entries = [entry for entry in layout.entries if entry.name not in pinned]
        chosen = [(entry, index % servers) for index, entry in enumerate(entries)]
        if policy == "greedy":
            chosen = _greedy(entries, _loads(layout, pinned, servers))
        free = [Placement(entry, entry.start, entry.stop, server) for entry, server in chosen]
    whole = [Placement(e, e.start, e.stop, pinned[e.name]) for e in layout.entries if e.name in pinned]
    return sorted([*free, *whole], key=lambda placement: placement.start)


def ranges_of(placements: Sequence[Placement], server: int, layout: Layout) -> list[tuple[int, int]]:
    """Return the server's ranges of the vector, adjacent ones joined; all servers' ranges cover [0, size).

    The alignment gap after a variable belongs to the variable's last range.
    """
    starts = [placement.start for placement in placements[1:]] + [layout.size]
    ranges: list[tuple[int, int]] = []
    for placement, following in zip(placements, starts, strict=True):
        if placement.server != server:
            continue
        if ranges and ranges[-1][1] == placement.start:
            ranges[-1] = (ranges[-1][0], following)
        else:
            ranges.append((placement.start, following))
    return ranges


def _pinned(layout: Layout, servers: int, itemsize: int, pins: Pins | None) -> dict[str, int]:
    if pins is None:
        return {}
    names = [entry.name for entry in layout.entries]
    if callable(pins):
        answers = {e.name: _ask(pins, e, itemsize) for e in layout.entries}
        pinned = {name: server for name, server in answers.items() if server is not None}
    elif isinstance(pins, Mapping):
        pinned = dict(pins)
    else:
        raise JobError(
            f"Job(pins=...) got {pins!r}: must be a dict from names to servers, or a function of name, shape and bytes"
        )
    for name, server in pinned.items():
        if name not in names:
            raise JobError(
                f"Job(pins=...) pins {name!r}, which is not a variable of the model: {', '.join(names[:12])}"
            )
        if isinstance(server, bool) or not isinstance(server, int) or not 0 <= server < servers:
            raise JobError(
                f"Job(pins=...) pins {name!r} to server {server!r}: must be an integer from 0 to {servers - 1}"
            )
    return pinned


def _ask(pins: Callable[[str, Shape, int], int | None], entry: Entry, itemsize: int) -> int | None:
    try:
        return pins(entry.name, entry.shape, entry.size * itemsize)
    except Exception as error:
        raise JobError(
            f"Job(pins=...): the function raises {type(error).__name__} for {entry.name!r}: {error}"
        ) from error


def _loads(layout: Layout, pinned: Mapping[str, int], servers: int) -> list[int]:
    loads = [0] * servers
    for entry in layout.entries:
        if entry.name in pinned:
            loads[pinned[entry.name]] += entry.size
    return loads


def _greedy(entries: list[Entry], loads: list[int]) -> list[tuple[Entry, int]]:
    chosen = []
    for entry in sorted(entries, key=lambda e: -e.size):
        server = loads.index(min(loads))
        loads[server] += entry.size
        chosen.append((entry, server))
    return chosen


def _cut(entry: Entry, servers: int) -> list[Placement]:
    """Split a variable into nearly equal ranges at cache lines; a small variable has fewer ranges than servers."""
    lines = -(-entry.size // ALIGN)
    cuts = [min(entry.start + lines * i // servers * ALIGN, entry.stop) for i in range(servers)] + [entry.stop]
    return [Placement(entry, cuts[i], cuts[i + 1], i) for i in range(servers) if cuts[i] < cuts[i + 1]]
