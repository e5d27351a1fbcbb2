"""Requests to continue a live run on other ranks or hosts, sent by ``mpitrain scale`` and answered by the supervisor.

A request is a file in the run directory. The file exists until the supervisor has refused the request or the ranks have
ended. A run therefore has one request at a time, and ranks can read why they are asked to stop. The answer is another
file, which stays until the run ends; an identifier shows to which request the answer belongs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.files import replace_file
from ..errors import LaunchError
from ..process.run_directory import SCALE_ANSWER, SCALE_REQUEST, launcher_of
from .hosts import parse_hosts

_POLL_S = 0.1


@dataclass(frozen=True)
class ScaleRequest:
    """The ranks of a run from now on.

    Attributes:
        ranks: The number of ranks; None for all slots of the hosts.
        hosts: Hosts as for ``--hosts``; None for the same hosts.
        identifier: Text that no other request has.

    Raises:
        LaunchError: Neither ``ranks`` nor ``hosts`` is set, or the hosts are malformed.
    """

    ranks: int | None = None
    hosts: str | None = None
    identifier: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        if self.ranks is None and self.hosts is None:
            raise LaunchError("nothing to change: give -n N, --hosts HOST:RANKS,... or both")
        if self.hosts is not None:
            parse_hosts(self.hosts)


def send_request(run_dir: Path, request: ScaleRequest) -> None:
    """Request that the supervisor of a run continues it on other ranks, and wait for the answer.

    The supervisor answers when all ranks have started. A caller that does not wait until then withdraws the request.

    Raises:
        LaunchError: ``mpitrain run`` does not supervise the run, or it refuses the request. The run has another
            request, or ends before the answer. Or the directory cannot be written.
    """
    if launcher_of(run_dir) is None:
        raise LaunchError(f"{run_dir} is not the directory of a live run that mpitrain run has started")
    with _sent(run_dir, request):
        while (answer := _read(run_dir / SCALE_ANSWER)).get("identifier") != request.identifier:
            if launcher_of(run_dir) is None:
                raise LaunchError(f"{run_dir} has ended before it could be scaled")
            time.sleep(_POLL_S)
    if answer["error"]:
        raise LaunchError(f"{answer['error']}; the run continues unchanged")


def read_request(run_dir: Path) -> ScaleRequest | None:
    """Return the request that waits for an answer; None if there is none."""
    path = run_dir / SCALE_REQUEST
    content = _read(path) if path.exists() else {}
    if not content:  # the request was withdrawn, or is not readable at this moment
        return None
    try:
        return ScaleRequest(**content)
    except (TypeError, LaunchError):  # the file was not written by ``send_request``
        _remove(path)
        return None


def answer_request(run_dir: Path, request: ScaleRequest, error: str) -> None:
    """Accept a request; if there is an error, refuse and remove it."""
    with contextlib.suppress(OSError):
        answer = {"identifier": request.identifier, "error": error}
        replace_file(run_dir / SCALE_ANSWER, json.dumps(answer).encode())
    if error:
        remove_request(run_dir)


def remove_request(run_dir: Path) -> None:
    """Permit another request."""
    _remove(run_dir / SCALE_REQUEST)


def remove_requests(run_dir: Path) -> None:
    """Remove the request and the last answer at the end of a run."""
    for name in (SCALE_REQUEST, SCALE_ANSWER):
        _remove(run_dir / name)


@contextlib.contextmanager
def _sent(run_dir: Path, request: ScaleRequest) -> Iterator[None]:
    """Send a request; withdraw it if the block raises an exception."""
    path, partial = run_dir / SCALE_REQUEST, run_dir / f"{SCALE_REQUEST}.{request.identifier}"
    try:
        partial.write_text(json.dumps(asdict(request)), encoding="utf-8")
        try:
            os.link(partial, path)  # unlike a rename, a link fails if there is another request
        finally:
            _remove(partial)
    except FileExistsError:
        raise LaunchError(f"{run_dir} is being scaled already; try again when its ranks have started") from None
    except OSError as error:
        raise LaunchError(f"{run_dir} cannot be written: {error.strerror}") from error
    try:
        yield
    except BaseException:
        _remove(path)
        raise


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file; empty if it is missing or malformed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
