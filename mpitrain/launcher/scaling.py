"""Requests to continue a live run on other ranks or hosts: ``mpitrain scale`` writes one, the supervisor takes it."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import LaunchError
from ..process.run_directory import SCALE_REQUEST, launcher_of
from .hosts import parse_hosts


@dataclass(frozen=True)
class ScaleRequest:
    """The ranks of a run from now on.

    Attributes:
        ranks: Their number; None for all slots of the hosts.
        hosts: Hosts as for ``--hosts``; None for the same hosts.

    Raises:
        LaunchError: Neither is given, or the hosts are malformed.
    """

    ranks: int | None = None
    hosts: str | None = None

    def __post_init__(self) -> None:
        if self.ranks is None and self.hosts is None:
            raise LaunchError("nothing to change: give -n N, --hosts HOST:RANKS,... or both")
        if self.hosts is not None:
            parse_hosts(self.hosts)


def send_request(run_dir: Path, request: ScaleRequest) -> None:
    """Ask the supervisor of a run to continue it on other ranks.

    Raises:
        LaunchError: ``mpitrain run`` does not supervise it, or the directory cannot be written.
    """
    if launcher_of(run_dir) is None:
        raise LaunchError(f"{run_dir} is not the directory of a live run that mpitrain run has started")
    partial = run_dir / f"{SCALE_REQUEST}.partial"
    try:
        partial.write_text(json.dumps(asdict(request)), encoding="utf-8")
        os.replace(partial, run_dir / SCALE_REQUEST)
    except OSError as error:
        raise LaunchError(f"{run_dir} cannot be written: {error.strerror}") from error


def take_request(run_dir: Path) -> ScaleRequest | None:
    """Return the request that was sent last, once; None if there is none."""
    path = run_dir / SCALE_REQUEST
    try:
        request = ScaleRequest(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LaunchError):
        request = None
    with contextlib.suppress(OSError):
        path.unlink()
    return request
