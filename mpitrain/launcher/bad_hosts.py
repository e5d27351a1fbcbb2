"""Hosts that a run does not use any more, in a file of its directory; the user deletes the lines of repaired hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from ..core.files import replace_file
from ..plan.launch_options import LaunchOptions

FILE = "bad_hosts.txt"


def of(options: LaunchOptions, run_dir: Path | None) -> dict[str, str]:
    """Return the reasons by host, of a run that can do without these hosts; else none."""
    can_do_without = options.min_ranks is not None or options.spare_hosts
    return read(run_dir) if run_dir is not None and can_do_without else {}


def read(run_dir: Path) -> dict[str, str]:
    """Return the reasons by host; none if there is no file that can be read."""
    with contextlib.suppress(OSError, ValueError):
        lines = (run_dir / FILE).read_text(encoding="utf-8").splitlines()
        words = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
        return {host: reason[0] if reason else "no reason is given" for host, *reason in words}
    return {}


def record(run_dir: Path, hosts: Mapping[str, str]) -> None:
    """Add hosts with the reasons."""
    if not hosts:
        return
    lines = [f"{host} {reason}\n" for host, reason in {**read(run_dir), **hosts}.items()]
    with contextlib.suppress(OSError):  # the hosts are reported, too
        replace_file(run_dir / FILE, "".join(lines).encode())


def failed_twice(host: str, kills: Mapping[str, int]) -> bool:
    """Return whether a signal has killed ranks on a host in two attempts, and on no other host.

    Args:
        host: The host of the last failure; empty if no signal has killed a rank.
        kills: The number of such attempts by host.
    """
    return kills.get(host, 0) > 1 and len(kills) == 1
