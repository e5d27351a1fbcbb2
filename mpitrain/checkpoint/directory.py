"""The checkpoints of a run: list them, verify them, and remove old ones.

``best.json`` names the checkpoint with the best value of a validation metric. Commands and functions that take a
checkpoint take ``RUN/best``, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ..core.checkpoint_files import path_for, shard_paths, steps
from ..core.files import replace_file
from ..errors import CheckpointError, DamagedCheckpoint
from .disk import flush_folder
from .reader import Checkpoint
from .snapshot import BestCheckpoint

T = TypeVar("T")

BEST = "best"
_RECORD = "best.json"


def newest(folder: Path) -> Path | None:
    """Return the checkpoint of the highest step in a directory, or None, without verifying it."""
    return next(iter(steps(folder).values()), None)


def find(path: Path) -> list[Path]:
    """Return the checkpoint at ``path``, or all checkpoints of a run directory, newest first, without verifying them.

    ``path`` may also be the folder ``checkpoints`` of a run directory. ``RUN/best`` is the best checkpoint.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if path.name == BEST and not path.exists():
        return [_best_in(path.parent)]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint or a run directory")
    if not path.is_dir():
        return [path]
    checkpoints = [*steps(path).values()] or [*steps(path / "checkpoints").values()]
    if not checkpoints:
        raise CheckpointError(f"{path} contains no checkpoint; give a checkpoint or a run directory that has one")
    return checkpoints


def best(folder: Path) -> BestCheckpoint | None:
    """Return the record of the best checkpoint in a directory, or None."""
    try:
        values = json.loads((folder / _RECORD).read_bytes())
        return BestCheckpoint(int(values["step"]), values["metric"], float(values["value"]), bool(values["only_best"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def record_best(folder: Path, new: BestCheckpoint) -> None:
    """Record that a checkpoint is the best; remove the previous best checkpoint if it was kept only for that reason.

    Raises:
        OSError: A file cannot be written or removed.
    """
    former = best(folder)
    replace_file(folder / _RECORD, f"{json.dumps(new._asdict())}\n".encode())
    flush_folder(folder)
    if former is not None and former.only_best and former.step != new.step:
        _remove(path_for(folder, former.step))


def _best_in(folder: Path) -> Path:
    """Return the best checkpoint of a run directory or of a directory of checkpoints.

    Raises:
        CheckpointError: There is no best checkpoint.
    """
    for checkpoints in (folder, folder / "checkpoints"):
        if (record := best(checkpoints)) is not None and (path := path_for(checkpoints, record.step)).exists():
            return path
    raise CheckpointError(f"{folder} has no best checkpoint; train with --stop-metric NAME --keep-best")


def _remove(path: Path) -> None:
    shards = shard_paths(path)
    path.unlink(missing_ok=True)  # remove the index first: shards without an index are not a checkpoint
    for shard in shards:
        shard.unlink(missing_ok=True)


def verify(path: Path) -> None:
    """Read and verify all data of a checkpoint.

    Raises:
        DamagedCheckpoint: It is damaged.
    """
    with Checkpoint(path) as checkpoint:
        checkpoint.verify()


def first_intact(paths: Iterable[Path], read: Callable[[Path], T]) -> tuple[tuple[Path, T] | None, list[str]]:
    """Return the first undamaged checkpoint with the result of ``read``, or None; and the errors of the skipped ones.

    Args:
        paths: Checkpoints, in order of preference.
        read: Reads a checkpoint; raises DamagedCheckpoint if it is damaged.
    """
    skipped: list[str] = []
    for path in paths:
        try:
            return (path, read(path)), skipped
        except DamagedCheckpoint as error:
            skipped.append(str(error))
    return None, skipped


class Retention:
    """Removes old checkpoints, but never the last undamaged one, nor the best one.

    Args:
        keep: Number of newest checkpoints to keep; 0 for all.
        keep_every: Also keep the checkpoints at multiples of this step; 0 for none.
    """

    def __init__(self, keep: int, keep_every: int = 0) -> None:
        self._keep, self._keep_every = keep, keep_every
        self._known: set[tuple[int, ...]] = set()  # files already verified, so that none is read twice

    def prune(self, folder: Path) -> list[Path]:
        """Remove old checkpoints; return their paths.

        Raises:
            OSError: A file cannot be removed.
        """
        if not self._keep:
            return []
        existing, record = steps(folder), best(folder)
        wanted = [
            path
            for index, (step, path) in enumerate(existing.items())
            if index < self._keep or self._is_kept_for_good(step) or (record is not None and step == record.step)
        ]
        rest = [path for path in existing.values() if path not in wanted]
        if not rest:
            return []
        if not any(self._verifies(path) for path in self._known_first(wanted)):
            spared = next((path for path in rest if self._verifies(path)), None)
            rest = [path for path in rest if path != spared]
        for path in rest:
            _remove(path)
        flush_folder(folder)
        return rest

    def _is_kept_for_good(self, step: int) -> bool:
        return self._keep_every > 0 and step % self._keep_every == 0

    def _known_first(self, paths: list[Path]) -> Iterator[Path]:
        yield from sorted(paths, key=lambda path: _identity(path) not in self._known)

    def _verifies(self, path: Path) -> bool:
        identity = _identity(path)
        if identity not in self._known:
            try:
                verify(path)
            except DamagedCheckpoint:
                return False
            self._known.add(identity)
        return True


def _identity(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
