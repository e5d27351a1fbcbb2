"""How a process with process groups ends: other ranks must not wait for it.

``MPI_Finalize`` waits for all ranks. A rank that ends with an exception therefore ends all other ranks. A rank that
ends in any other way notifies the ranks of its node, which then stop waiting for this rank.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from types import TracebackType

from ..comm.mpi import MPI
from .staging import Staging

_groups: weakref.WeakSet[Staging] = weakref.WeakSet()
_watched = False  # whether the end of this process is watched
_raised = False  # whether this process ends with an exception


def watch(staging: Staging) -> None:
    """Tell the other ranks of a group's node when this process ends. Local."""
    global _watched
    _groups.add(staging)
    if not _watched:
        _watched = True
        atexit.register(_at_exit, os.getpid())
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            global _raised
            _raised = True  # ``_at_exit`` then ends the other ranks; the traceback is printed before
            previous(kind, error, trace)

        sys.excepthook = hook


def forget(staging: Staging) -> None:
    """Undo ``watch``, before the group's memory is freed."""
    _groups.discard(staging)


def is_raising() -> bool:
    """Return whether this process ends with an exception."""
    return _raised


def _at_exit(pid: int) -> None:
    if os.getpid() != pid or MPI.Is_finalized():
        return  # a forked process, such as a data loader's
    for staging in list(_groups):
        staging.mark_ended()
    if _raised and MPI.COMM_WORLD.size > 1:
        _abort()


def end_process(error: Exception) -> None:
    """Print an error and end all ranks; does not return."""
    print(f"mpitrain: {error}", file=sys.stderr)
    _abort()


def _abort() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.1)  # launchers may drop what a rank has printed just before it aborts
    MPI.COMM_WORLD.Abort(1)
