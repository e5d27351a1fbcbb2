"""Answers to ``mpitrain stacks``: activity and stacks of each rank of a live run, in files in the run directory.

The command creates a folder in the run's ``logs``. Every rank's reaper looks for this folder, and writes one file into
the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core.files import replace_file

_POLL_S = 0.1
_ABANDONED_S = 60.0


@dataclass(frozen=True)
class RankStacks:
    """The activity and the stacks of a rank.

    Attributes:
        role: The rank's role, such as ``worker 0``; empty while the rank starts.
        state: The letter of the process's state in /proc.
        doing: A description of the rank's activity.
        idle_s: Seconds since the rank began this activity.
        waits_for: The rank for which this rank waits, if it waits for a single known rank; else None.
        stacks: The Python stacks of the rank's threads; empty if its process is stopped.
    """

    rank: int
    role: str
    host: str
    pid: int
    state: str
    step: int
    doing: str
    idle_s: float
    waits_for: int | None
    stacks: str


def is_asked(run_dir: Path, rank: int) -> bool:
    """Return whether the stacks of a rank are requested, and not written yet; called by its reaper."""
    folder = _folder(run_dir)
    # On a network file system, opening the directory makes the client look for new entries in it.
    with contextlib.suppress(OSError):
        os.close(os.open(folder.parent, os.O_RDONLY))
    return os.path.isdir(folder) and not os.path.exists(_path(folder, rank))  # errors such as ESTALE are ignored


def answer(run_dir: Path, stacks: RankStacks) -> None:
    """Write a rank's answer; called by its reaper."""
    with contextlib.suppress(OSError):  # the command may have ended
        replace_file(_path(_folder(run_dir), stacks.rank), json.dumps(asdict(stacks)).encode())


def ask(run_dir: Path, ranks: int, timeout_s: float) -> list[RankStacks]:
    """Return the stacks of the ranks that answer within the timeout, in rank order.

    Args:
        ranks: Number of ranks of the run.

    Raises:
        OSError: The run directory cannot be written, or another process is requesting stacks (FileExistsError).
    """
    folder = _folder(run_dir)
    with contextlib.suppress(OSError):
        if time.time() - folder.stat().st_mtime > _ABANDONED_S:  # the process that created the folder was killed
            shutil.rmtree(folder)
    folder.mkdir()
    try:
        deadline = time.monotonic() + timeout_s
        answers: dict[Path, RankStacks] = {}
        while len(answers) < ranks and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            answers |= dict(_answers(folder, answers))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return sorted(answers.values(), key=lambda stacks: stacks.rank)


def _answers(folder: Path, known: dict[Path, RankStacks]) -> Iterator[tuple[Path, RankStacks]]:
    for path in folder.glob("*.json"):
        if path not in known:
            with contextlib.suppress(OSError, ValueError, TypeError):
                yield path, RankStacks(**json.loads(path.read_text(encoding="utf-8")))


def _folder(run_dir: Path) -> Path:
    return run_dir / "logs" / ".stacks"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"
