"""A lock for torch's random generator on the CPU, which is global: only one replica at a time may draw numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()


@contextmanager
def exclusive() -> Iterator[None]:
    """Wait until no other thread of this process computes; compute alone in this context."""
    with _lock:
        yield


@contextmanager
def released() -> Iterator[None]:
    """Let other threads compute in this context, if it is inside ``exclusive``; keep this thread's random state.

    A script's own loop computes in one thread, without ``exclusive``.
    """
    if not _lock.locked():
        yield
        return
    state = torch.get_rng_state()
    _lock.release()
    try:
        yield
    finally:
        _lock.acquire()
        torch.set_rng_state(state)
