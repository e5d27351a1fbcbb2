"""The state of a job's hooks in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..core.extra_state import ExtraState, Versioned, values_of
from ..errors import CheckpointError, JobError
from ..plan.hook import Hook

_NAMESPACE, _VERSION = "hooks", 1
_LARGEST_BYTES = 32_768  # an HDF5 attribute holds at most 64 KiB


class HookState:
    """The state of a job's hooks; see ``core.extra_state.HasExtraState``."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = hooks

    def extra_state(self) -> ExtraState:
        """Return the state of all hooks that have one. Local.

        Raises:
            JobError: A hook's state cannot be saved.
        """
        states = [[type(hook).__name__, hook.state_dict()] for hook in self._hooks]
        text = json.dumps([state for state in states if state[1]], default=_refuse)
        nbytes = len(text.encode())
        if nbytes > _LARGEST_BYTES:
            raise JobError(f"the state of all hooks has {nbytes:,} bytes: must be at most {_LARGEST_BYTES:,}")
        return {_NAMESPACE: Versioned(_VERSION, {"states": text})} if text != "[]" else {}

    def load_extra_state(self, state: ExtraState) -> None:
        """Restore the hooks' state: the n-th saved state of a class goes to the job's n-th hook of this class. Local.

        Raises:
            CheckpointError: The state was not made by ``extra_state``.
        """
        saved = _states(str(values_of(state, _NAMESPACE, _VERSION).get("states", "[]")))
        for hook in self._hooks:
            entry = next((entry for entry in saved if entry[0] == type(hook).__name__), None)
            if entry is not None:
                saved.remove(entry)
                hook.load_state_dict(entry[1])


def _states(text: str) -> list[tuple[str, Any]]:
    try:
        return [(name, values) for name, values in json.loads(text)]
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "the checkpoint's state of hooks is malformed; use another checkpoint, or --init-from", on_all_ranks=True
        ) from error


def _refuse(value: object) -> None:
    raise JobError(
        f"a hook's state_dict has a value of type {type(value).__name__}: must be a number, string, list or dict"
    )
