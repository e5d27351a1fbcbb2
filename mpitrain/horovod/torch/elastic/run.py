"""``run``: a decorator for training functions that continue from their last commit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....errors import HorovodInternalError
from ....process.rank_status import RUN_DIR_VARIABLE
from ... import world
from ..functions import broadcast_object
from .state import CommitFile, State

_FOLDER = "horovod"


class HostsUpdatedInterrupt(RuntimeError):
    """An exception that restarts the function without restoring the committed state.

    Args:
        skip_sync: Whether to start again without copying the state of the first rank to the other ranks.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function whose first argument is a ``State``. Calls are collective over all ranks.

    The function starts with the state of the first rank. If an operation fails on all ranks, the function starts again
    with the committed state. After a rank has died, all ranks must be restarted: use ``mpitrain run --max-restarts``.
    The function then starts with the state that was committed in the run directory, on any number of ranks.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise ValueError(f"the first argument of {func.__qualname__} must be a State, not {state!r}")
        _restore(state, func.__qualname__)
        skip_sync = False
        while True:
            if not skip_sync:
                state.sync()
            try:
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                if world.current().has_failed:
                    raise
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            state.on_reset()

    return wrapper


def _restore(state: State, name: str) -> None:
    """Load the state that an earlier attempt has committed, and adapt it to these ranks. Collective over all ranks."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if run_dir is None:
        return
    is_first = world.current().rank == 0
    path = Path(run_dir) / _FOLDER / f"{name.replace('/', '-')}.pt"
    if broadcast_object(state.attach(CommitFile(path, is_first)), name="elastic commit"):
        state.on_reset()
