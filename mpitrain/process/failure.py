"""``failure.json`` in a run directory: which rank ended a run, and how; written by ``mpitrain run``."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FAILURE = "failure.json"


@dataclass(frozen=True)
class Failure:
    """How a run failed.

    Attributes:
        reason: One line: the rank, its host, and what happened.
        rank: The rank that failed first; None if unknown.
        traceback: The traceback of the rank's exception; empty if there is none.
    """

    reason: str
    rank: int | None = None
    traceback: str = ""


def record_failure(run_dir: Path, failure: Failure | None) -> None:
    """Record how a run failed; None removes the record. If the directory cannot be written, nothing happens."""
    with contextlib.suppress(OSError):
        if failure is None:
            (run_dir / FAILURE).unlink(missing_ok=True)
            return
        partial = run_dir / f".{FAILURE}.partial"
        partial.write_text(json.dumps(asdict(failure)) + "\n", encoding="utf-8")
        os.replace(partial, run_dir / FAILURE)


def read_failure(run_dir: Path) -> Failure | None:
    """Return how a run failed; None if it did not fail, or has no valid record."""
    try:
        return Failure(**json.loads((run_dir / FAILURE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
