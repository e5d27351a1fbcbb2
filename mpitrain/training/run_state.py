"""The complete state of a run, for checkpoints: the strategy's vectors, and the state of the other parts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..checkpoint import Snapshot
from ..core.extra_state import HasExtraState, StoredState
from ..strategy.base import Strategy

_log = logging.getLogger(__name__)


class RunState:
    """The state of a run, on one worker.

    Args:
        parts: Objects whose state a checkpoint stores in addition to the strategy's.
    """

    def __init__(self, strategy: Strategy, parts: Sequence[HasExtraState]) -> None:
        self._strategy, self._parts = strategy, parts

    def load(self, state: StoredState) -> None:
        """Restore the state of the parts; report state that no part has used. Local."""
        for part in self._parts:
            part.load_extra_state(state)
        for namespace in sorted(state.keys() - state.used):
            _log.info("the checkpoint has the state %r, which this run does not use: it is dropped", namespace)

    def snapshot(self) -> Snapshot:
        """Return the state for a checkpoint; see ``Strategy.snapshot``."""
        snapshot = self._strategy.snapshot()
        for part in self._parts:
            snapshot.extra_state = {**snapshot.extra_state, **part.extra_state()}
        return snapshot
