"""What a trace sums up to: how much of the ranks' time was compute, communication not hidden, waiting, and for whom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RecordError
from ..monitor.trace import TRACE

# What a kind of span counts as, in the order in which shares are shown.
GROUPS: dict[str, tuple[str, ...]] = {
    "compute": ("forward", "backward", "update"),
    "communication not hidden": ("average", "push", "pull"),
    "waiting": ("wait",),
    "loading": ("load",),
    "serving": ("serve",),
    "saving": ("save",),
    "validating": ("validate",),
    "other": ("step",),
}


@dataclass(frozen=True)
class RankShares:
    """Where one rank's time went.

    Attributes:
        rank, role, host: Which.
        seconds: Own seconds by kind of span, over the whole run.
        waited_for_s: What other ranks waited for this one, in the steps that the trace has in full.
    """

    rank: int
    role: str
    host: str
    seconds: Mapping[str, float]
    waited_for_s: float

    @property
    def total_s(self) -> float:
        """All of the time that was recorded."""
        return sum(self.seconds.values())

    def group_s(self, group: str) -> float:
        """Seconds of one of ``GROUPS``."""
        return sum(self.seconds.get(kind, 0.0) for kind in GROUPS[group])


@dataclass(frozen=True)
class Shares:
    """Where the time of a run's ranks went.

    Attributes:
        ranks: In order.
        kept_steps: Steps that the trace has in full.
        kept_wait_s: Seconds that the ranks waited in them.
    """

    ranks: tuple[RankShares, ...]
    kept_steps: int
    kept_wait_s: float

    def fraction(self, group: str) -> float:
        """Share of a group in the time of all ranks."""
        total = sum(rank.total_s for rank in self.ranks)
        return sum(rank.group_s(group) for rank in self.ranks) / total if total else 0.0

    @property
    def waited_for(self) -> list[tuple[RankShares, float]]:
        """Whom others waited for, longest first, with its share of the waiting in the steps kept."""
        most = sorted(self.ranks, key=lambda rank: -rank.waited_for_s)
        return [(rank, rank.waited_for_s / self.kept_wait_s) for rank in most if rank.waited_for_s and self.kept_wait_s]


def read_shares(folder: Path) -> Shares | None:
    """What the trace in a run directory sums up to; None where the run left none.

    Raises:
        RecordError: There is a trace that cannot be read.
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
        raise RecordError(f"{path} cannot be read as a trace: {' '.join(str(error).split())}") from error


def _summary(lines: list[str]) -> dict[str, Any]:
    """The file's ``mpitrain`` object, which has a line of its own: the events may be many times larger."""
    for line in lines:
        if line.startswith('"mpitrain": '):
            return dict(json.loads(line.removeprefix('"mpitrain": ').rstrip().rstrip(",")))
    raise ValueError("it was not written by mpitrain")
