"""The summary of a trace: the ranks' time for compute, exposed communication and waiting, and for whom they waited."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.words import one_line
from ..errors import RecordError
from ..monitor.trace import TRACE

# The kinds of spans in each group, in display order.
GROUPS: dict[str, tuple[str, ...]] = {
    "compute": ("forward", "backward", "update"),
    "exposed communication": ("average", "push", "pull"),
    "waiting": ("wait",),
    "loading": ("load",),
    "serving": ("serve",),
    "saving": ("save",),
    "validating": ("validate",),
    "other": ("step", "hooks"),
}


@dataclass(frozen=True)
class RankShares:
    """The time of one rank by activity.

    Attributes:
        rank, role, host: Identify the rank.
        seconds: Own seconds by kind of span, over the whole run.
        waited_for_s: Seconds that other ranks waited for this rank, in the steps that the trace contains completely.
    """

    rank: int
    role: str
    host: str
    seconds: Mapping[str, float]
    waited_for_s: float

    @property
    def total_s(self) -> float:
        """Total recorded time."""
        return sum(self.seconds.values())

    def group_s(self, group: str) -> float:
        """Return the seconds of one of ``GROUPS``."""
        return sum(self.seconds.get(kind, 0.0) for kind in GROUPS[group])


@dataclass(frozen=True)
class Shares:
    """The time of a run's ranks by activity.

    Attributes:
        ranks: The times of the ranks, in rank order.
        kept_steps: Number of steps that the trace contains completely.
        kept_wait_s: Seconds that the ranks waited in these steps.
    """

    ranks: tuple[RankShares, ...]
    kept_steps: int
    kept_wait_s: float

    def fraction(self, group: str) -> float:
        """Return a group's share of the time of all ranks."""
        total = sum(rank.total_s for rank in self.ranks)
        return sum(rank.group_s(group) for rank in self.ranks) / total if total else 0.0

    @property
    def waited_for(self) -> list[tuple[RankShares, float]]:
        """The ranks for which others waited, longest first, with their share of the waiting in the kept steps."""
        most = sorted(self.ranks, key=lambda rank: -rank.waited_for_s)
        return [(rank, rank.waited_for_s / self.kept_wait_s) for rank in most if rank.waited_for_s and self.kept_wait_s]


def read_shares(folder: Path) -> Shares | None:
    """Return the summary of the trace in a run directory; None if there is no trace.

    Raises:
        RecordError: The trace cannot be read.
    """
    path = folder / TRACE
    try:
        with path.open(encoding="utf-8") as file:
            summary = _summary(file.readlines(1 << 16))
        ranks = tuple(
            RankShares(int(r["rank"]), str(r["role"]), str(r["host"]), dict(r["seconds"]), float(r["waited_for_s"]))
            for r in summary["ranks"]
        )
        return Shares(ranks, int(summary["kept_steps"]), float(summary["kept_wait_s"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} cannot be read as a trace: {one_line(error)}") from error


def _summary(lines: list[str]) -> dict[str, Any]:
    """Return the file's ``mpitrain`` object. It is on a line of its own, so the much larger events need not be read."""
    for line in lines:
        if line.startswith('"mpitrain": '):
            return dict(json.loads(line.removeprefix('"mpitrain": ').rstrip().rstrip(",")))
    raise ValueError("it was not written by mpitrain")
