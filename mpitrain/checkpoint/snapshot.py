"""The state of a run at one step: made by the strategy, written by the checkpoint writer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from ..core.extra_state import ExtraState
from ..core.layout import Array


class BestCheckpoint(NamedTuple):
    """The checkpoint with the best value of a validation metric.

    Attributes:
        step: Its step.
        metric: The name of the metric.
        value: Its value.
        only_best: Whether the checkpoint is kept only because it is the best; the next best checkpoint then replaces
            it.
    """

    step: int
    metric: str
    value: float
    only_best: bool = False


class Snapshot:
    """The state that a checkpoint stores. Local.

    Args:
        vectors: Flat vectors, shape (layout.size,): ``params``, the optimizer's slots, and ``average`` if there is one.
        step: Number of completed steps.
        data_cursor: Number of examples taken from the endless stream.
        extra_state: The state that is not in the vectors.
        private: Whether the vectors are copies that no other code uses.

    Attributes:
        best: The record of this checkpoint if it is the best one so far, else None.

    The vectors of a snapshot that is not private are in use by training; they do not change before ``release``.
    """

    def __init__(
        self,
        vectors: Mapping[str, Array],
        step: int,
        data_cursor: int,
        extra_state: ExtraState | None = None,
        private: bool = False,
    ) -> None:
        self.vectors, self.step, self.data_cursor = vectors, step, data_cursor
        self.extra_state: ExtraState = extra_state or {}
        self.private = private
        self.best: BestCheckpoint | None = None
        self._released = threading.Event()
        if private:
            self._released.set()

    def release(self) -> None:
        """Declare that the vectors may change; any thread may call this."""
        self._released.set()

    def wait(self) -> None:
        """Wait until the vectors may change."""
        self._released.wait()
