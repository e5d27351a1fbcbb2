"""Save checkpoints one after the other, optionally in the background."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from ..core.layout import Array
from ..errors import CheckpointError
from ..monitor.trace import span
from .directory import Retention, record_best
from .snapshot import BestCheckpoint, Snapshot

_log = logging.getLogger(__name__)

# Writes a checkpoint or a shard; raises OSError.
Write = Callable[[Snapshot], None]


class CheckpointWriter:
    """Writes a run's checkpoints; every rank that writes has a writer. Methods are local, and called by one thread.

    A failed save is logged, not raised: the run survives a full disk, and its older checkpoints stay.

    Args:
        folder: The checkpoint directory.
        write: Writes a checkpoint, or with ``is_sharded`` a shard; then ``complete`` completes the checkpoint.
        retention: Decides which older checkpoints to keep after each complete one.
        background: Whether to write from a copy of the state in a thread, while training continues.
        is_sharded: Whether checkpoints are sharded.

    Attributes:
        failure: Why the last save failed, or None.
        errno: The system's error number of that failure, or 0.
        longest_s: Duration of the longest save in seconds.
    """

    def __init__(
        self, folder: Path, write: Write, retention: Retention, background: bool, is_sharded: bool = False
    ) -> None:
        self._folder, self._write, self._retention = folder, write, retention
        self._background, self._is_sharded = background, is_sharded
        self._copies: dict[str, Array] = {}
        self._thread = ThreadPoolExecutor(1, "saving")
        self._saving: Future[None] | None = None
        self._best: BestCheckpoint | None = None  # set if the checkpoint of the last ``save`` is the best one
        self.failure: str | None = None
        self.errno = 0
        self.longest_s = 0.0

    def save(self, snapshot: Snapshot) -> None:
        """Save the state after the previous save has ended; with ``background``, do not wait until it is saved."""
        self.finish()
        self._best = snapshot.best
        if self._background and not snapshot.private:
            self._start(snapshot.step, lambda: self._write(self._copy(snapshot)))
            return
        self._start(snapshot.step, partial(self._write_and_release, snapshot))

    def complete(self, step: int, write: Callable[[], None]) -> None:
        """Complete a sharded checkpoint after ``save`` by calling ``write``, which may raise OSError."""
        self.finish()
        self._start(step, write, is_complete=True)

    @property
    def busy(self) -> bool:
        """Whether a save is in progress."""
        return self._saving is not None and not self._saving.done()

    def finish(self) -> None:
        """Wait for the save in progress, if any."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def close(self) -> None:
        """Finish, and free the copies."""
        self.finish()
        self._thread.shutdown()
        self._copies.clear()

    def _copy(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot with copies of the vectors, and release the given one; runs in the thread.

        Raises:
            CheckpointError: There is not enough memory. The run ends, because other nodes wait for this node's shard.
        """
        try:
            for name, vector in snapshot.vectors.items():
                if name not in self._copies:
                    self._copies[name] = np.empty_like(vector)  # reused: page faults take longer than the copy
                np.copyto(self._copies[name], vector)
        except MemoryError as error:
            raise CheckpointError(
                f"there is not enough memory for a copy of the state at step "
                f"{snapshot.step:,}; use --no-save-background"
            ) from error
        finally:
            snapshot.release()
        return Snapshot(self._copies, snapshot.step, snapshot.data_cursor, snapshot.extra_state, private=True)

    def _write_and_release(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        finally:
            snapshot.release()

    def _start(self, step: int, write: Callable[[], None], is_complete: bool = False) -> None:
        prune = is_complete or not self._is_sharded
        if self._background:
            self._saving = self._thread.submit(self._run, step, write, prune)
        else:
            self._run(step, write, prune)

    @span("save")
    def _run(self, step: int, write: Callable[[], None], prune: bool) -> None:
        """Call ``write`` and record the result; runs in the thread of background saves."""
        began = time.perf_counter()
        try:
            write()
            self.failure, self.errno = None, 0
        except (OSError, MemoryError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            number = (error.errno if isinstance(error, OSError) else None) or errno.ENOMEM
            self.fail(step, reason, number)
            return
        if prune:
            self._remove_old()
        self.longest_s = max(self.longest_s, time.perf_counter() - began)

    def fail(self, step: int, reason: str, number: int) -> None:
        """Record and log why the save of ``step`` failed; ``number`` is the system's error number."""
        self.errno = number
        self.failure = f"the checkpoint of step {step:,} could not be saved in {self._folder}: {reason}"
        _log.warning("%s; training continues, older checkpoints are unchanged", self.failure)

    def _remove_old(self) -> None:
        try:
            if self._best is not None:
                record_best(self._folder, self._best)
            self._retention.prune(self._folder)
        except OSError as error:
            _log.warning("the checkpoints in %s could not be updated: %s", self._folder, error.strerror)
