"""Saves checkpoints one after the other, beside the training if asked."""

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

# Given vectors by name, a step, a position and numbers, writes a checkpoint or a part of one; raises OSError.
Write = Callable[[Mapping[str, Array], int, int, Mapping[str, float] | None], None]


class CheckpointWriter:
    """Has a run's checkpoints written; who writes has one. Every method is local and called by one thread.

    A save that fails is told, and not raised: a run outlives a full disk, and its older checkpoints stay.

    Args:
        folder: Where checkpoints go.
        write: Writes a checkpoint, or with ``in_parts`` a part of one, which ``complete`` makes whole.
        retention: Which older ones stay, whenever one is whole.
        background: Write from a copy of the state in a thread, while training goes on.
        say: Called with a line for the user, by the thread that calls this.

    Attributes:
        failure: Why the last save failed, or None; ``errno`` is the system's number for that, or 0.
        longest_s: Seconds that the longest save took.
    """

    def __init__(
        self,
        folder: Path,
        write: Write,
        retention: Retention,
        background: bool,
        say: Callable[[str], None],
        in_parts: bool = False,
    ) -> None:
        self._folder, self._write, self._retention = folder, write, retention
        self._background, self._say, self._in_parts = background, say, in_parts
        self._copies: dict[str, Array] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint-saver")
        self._copying: Future[None] | None = None
        self._saving: Future[None] | None = None
        self._told: list[str] = []
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
        """Save the state, after the save before has ended.

        With ``background`` this returns at once, and the vectors must not change before ``wait_for_copy`` returns.

        Args:
            vectors, step, position, numbers: See ``state.write``.
            own: The vectors are the saver's from now on, and need not be copied.
        """
        self.finish()
        if self._background and not own:
            self._copying = self._thread.submit(self._copy, dict(vectors))
        held = vectors if own or not self._background else self._copies
        self._start(step, partial(self._write, held, step, data_cursor, extra_state))

    def complete(self, step: int, write: Callable[[], None]) -> None:
        """Make what ``save`` has saved in parts a checkpoint, by calling ``write``; that may raise OSError."""
        self.finish()
        self._start(step, write, whole=True)

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._saving is not None and not self._saving.done()

    def wait_for_copy(self) -> None:
        """Return when the vectors given to ``save`` may change."""
        if self._copying is not None:
            copying, self._copying = self._copying, None
            copying.result()

    def poll(self) -> None:
        """Tell the user what a save beside the training had to say."""
        while self._told:
            self._say(self._told.pop(0))

    def finish(self) -> None:
        """Wait for the save that is under way, if any."""
        self.wait_for_copy()
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()
        self.poll()

    def close(self) -> None:
        """Finish, and give the copy's memory back."""
        self.finish()
        self._thread.shutdown()
        self._copies.clear()

    def _copy(self, vectors: Mapping[str, Array]) -> None:
        for name, vector in vectors.items():
            if name not in self._copies:
                self._copies[name] = np.empty_like(vector)  # kept: touching new pages takes longer than copying
            np.copyto(self._copies[name], vector)

    def _start(self, step: int, write: Callable[[], None], whole: bool = False) -> None:
        prune = whole or not self._in_parts
        if self._background:
            self._saving = self._thread.submit(self.write_now, step, write, prune)
        else:
            self.write_now(step, write, prune)
            self.poll()

    def write_now(self, step: int, write: Callable[[], None], prune: bool) -> None:
        """Call ``write``, and note how that went; what a save does beside training."""
        began = time.perf_counter()
        try:
            write()
            self.failure, self.errno = None, 0
        except (OSError, MemoryError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            self.errno = (error.errno if isinstance(error, OSError) else None) or errno.ENOMEM
            self.failure = f"the checkpoint of step {step:,} could not be saved in {self._folder}: {reason}"
            self._told.append(f"{self.failure}; training goes on, and older checkpoints are as they were")
            return
        if prune:
            self._prune()
        self.longest_s = max(self.longest_s, time.perf_counter() - began)

    def _prune(self) -> None:
        try:
            self._retention.prune(self._folder)
        except OSError as error:
            self._told.append(f"old checkpoints in {self._folder} could not be removed: {error.strerror}")
