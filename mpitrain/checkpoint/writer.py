"""Save checkpoints one after the other, optionally in the background."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from ..core.layout import Array
from .directory import Retention

# Writes a checkpoint or a shard from vectors by name, step, data cursor and extra state; raises OSError.
Write = Callable[[Mapping[str, Array], int, int, Mapping[str, float] | None], None]


class CheckpointWriter:
    """Writes a run's checkpoints; every writing rank has one. Methods are local, and called by one thread.

    A failed save is reported, not raised: the run survives a full disk, and its older checkpoints stay.

    Args:
        folder: The checkpoint directory.
        write: Writes a checkpoint, or with ``is_sharded`` a shard; then ``complete`` completes the checkpoint.
        retention: Decides which older checkpoints to keep after each complete one.
        background: Whether to write from a copy of the state in a thread, while training continues.
        say: Called with a line for the user, in the calling thread.
        in_parts: Whether checkpoints are sharded.

    Attributes:
        failure: Why the last save failed, or None.
        errno: The system's error number for that, or 0.
        longest_s: Duration of the longest save in seconds.
    """

    def __init__(
        self,
        folder: Path,
        write: Write,
        retention: Retention,
        background: bool,
        say: Callable[[str], None],
        is_sharded: bool = False,
    ) -> None:
        self._folder, self._write, self._retention = folder, write, retention
        self._background, self._say, self._is_sharded = background, say, is_sharded
        self._copies: dict[str, Array] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint-saver")
        self._copying: Future[None] | None = None
        self._saving: Future[None] | None = None
        self._messages: list[str] = []
        self.failure: str | None = None
        self.errno = 0
        self.longest_s = 0.0

    def save(
        self,
        vectors: Mapping[str, Array],
        step: int,
        data_cursor: int,
        extra_state: Mapping[str, float] | None = None,
        own: bool = False,
    ) -> None:
        """Save the state, after the previous save has ended.

        With ``background`` this returns immediately, and the vectors must not change before ``wait_for_copy`` returns.

        Args:
            vectors, step, data_cursor, extra_state: See ``state.write``.
            own: Whether the writer may keep the vectors, so that they need not be copied.
        """
        self.finish()
        if self._background and not own:
            self._copying = self._thread.submit(self._copy, dict(vectors))
        held = vectors if own or not self._background else self._copies
        self._start(step, partial(self._write, held, step, data_cursor, extra_state))

    def complete(self, step: int, write: Callable[[], None]) -> None:
        """Complete a sharded checkpoint after ``save`` by calling ``write``, which may raise OSError."""
        self.finish()
        self._start(step, write, is_complete=True)

    @property
    def busy(self) -> bool:
        """Whether a save is in progress."""
        return self._saving is not None and not self._saving.done()

    def wait_for_copy(self) -> None:
        """Wait until the vectors given to ``save`` may change."""
        if self._copying is not None:
            copying, self._copying = self._copying, None
            copying.result()

    def poll(self) -> None:
        """Print the messages of background saves."""
        while self._messages:
            self._say(self._messages.pop(0))

    def finish(self) -> None:
        """Wait for the save in progress, if any."""
        self.wait_for_copy()
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()
        self.poll()

    def close(self) -> None:
        """Finish, and free the copies."""
        self.finish()
        self._thread.shutdown()
        self._copies.clear()

    def _copy(self, vectors: Mapping[str, Array]) -> None:
        for name, vector in vectors.items():
            if name not in self._copies:
                self._copies[name] = np.empty_like(vector)  # reused: page faults of new memory cost more than the copy
            np.copyto(self._copies[name], vector)

    def _start(self, step: int, write: Callable[[], None], is_complete: bool = False) -> None:
        prune = is_complete or not self._is_sharded
        if self._background:
            self._saving = self._thread.submit(self.write_now, step, write, prune)
        else:
            self.write_now(step, write, prune)
            self.poll()

    def write_now(self, step: int, write: Callable[[], None], prune: bool) -> None:
        """Call ``write`` and record the result; runs in the thread of background saves."""
        began = time.perf_counter()
        try:
            write()
            self.failure, self.errno = None, 0
        except (OSError, MemoryError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            self.errno = (error.errno if isinstance(error, OSError) else None) or errno.ENOMEM
            self.failure = f"the checkpoint of step {step:,} could not be saved in {self._folder}: {reason}"
            self._messages.append(f"{self.failure}; training continues, older checkpoints are unchanged")
            return
        if prune:
            self._prune()
        self.longest_s = max(self.longest_s, time.perf_counter() - began)

    def _prune(self) -> None:
        try:
            self._retention.prune(self._folder)
        except OSError as error:
            self._messages.append(f"old checkpoints in {self._folder} could not be removed: {error.strerror}")
