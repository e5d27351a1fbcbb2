"""Signs of life of learners: a learner lives if its state changes. Clocks of hosts are not compared."""

from __future__ import annotations

import json
import time
from typing import Any

from .store import Store

_LOOK_S = 2.0  # seconds between two looks that count as silence, at most


class Signs:
    """The states of other learners, as this process sees them; used by one thread. Methods raise OSError.

    Time in which this process did not look counts as little silence: it was suspended, or could not use the store, and
    then the others perhaps could not, either.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[str, tuple[bytes, float, float]] = {}  # a learner's state, when it was read, and the silence

    def look(self, name: str) -> tuple[bytes, float]:
        """Return a learner's state, and for how many seconds it has not changed; 0 at the first look."""
        state, now = self._store.read(f"state.{name}") or b"{}", time.monotonic()
        before, looked_s, silent_s = self._seen.get(name, (b"", now, 0.0))
        silent_s = silent_s + min(now - looked_s, _LOOK_S) if state == before else 0.0
        self._seen[name] = state, now, silent_s
        return state, silent_s

    def forget(self, name: str) -> None:
        """Begin again with a learner."""
        self._seen.pop(name, None)


def read_state(store: Store, name: str) -> dict[str, Any]:
    """Return what a learner says of itself; empty if it has said nothing."""
    return parse_state(store.read(f"state.{name}"))


def parse_state(data: bytes | None) -> dict[str, Any]:
    """Return what a learner says of itself; empty if it has said nothing, or the file is damaged."""
    try:
        state = json.loads(data or b"{}")
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}
