"""The states from which a run can resume: its checkpoints, and the newest state in the memory of this host."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.checkpoint_files import path_for, steps

if TYPE_CHECKING:  # it imports NumPy and h5py, and most starts need neither
    from ..checkpoint.memory import StateInMemory


class SavedStates:
    """The states that a run has saved.

    Args:
        resumes: Whether checkpoints that exist already belong to this run.
        keeps_state: Whether the ranks keep the newest state in memory.
    """

    def __init__(self, run_dir: Path, resumes: bool, keeps_state: bool) -> None:
        self._run_dir, self._keeps_state = run_dir, keeps_state
        self._earlier = set() if resumes else set(self._checkpoints())

    def newest_checkpoint(self) -> Path | None:
        """Return this run's newest checkpoint; None if there is none."""
        return next((path for path, time_ns in self._checkpoints() if (path, time_ns) not in self._earlier), None)

    def describe(self) -> str:
        """Return a description of the state from which a restart resumes, considering the states on this host."""
        path, state = self.newest_checkpoint(), self._newer_state()
        if state is not None:
            return f"the state of step {state.step:,} in memory"
        return "the beginning" if path is None else path.name

    def save_state(self) -> str:
        """Save the state in memory as a checkpoint if it is the newest one; return a message, else an empty string."""
        state = self._newer_state()
        if state is None:
            return ""
        from ..checkpoint.memory import save_as_checkpoint

        try:
            path = save_as_checkpoint(state, self._run_dir / "checkpoints")
        except (OSError, ValueError) as error:
            return f"the state of step {state.step:,} in memory could not be saved: {error}"
        return f"the state of step {state.step:,} in memory was saved as {path.name}"

    def _newer_state(self) -> StateInMemory | None:
        """Return the newest state in the memory of this host, if it is newer than the run's checkpoints."""
        if not self._keeps_state:
            return None
        from ..checkpoint.memory import newest_state

        path, state = self.newest_checkpoint(), newest_state(str(self._run_dir))
        is_newer = state is not None and (path is None or path < path_for(path.parent, state.step))
        return state if is_newer else None

    def _checkpoints(self) -> list[tuple[Path, int]]:
        """Return the checkpoints in the run directory with their modification times, the highest step first."""
        checkpoints = []
        for path in steps(self._run_dir / "checkpoints").values():
            with contextlib.suppress(OSError):  # the checkpoint is being removed
                checkpoints.append((path, path.stat().st_mtime_ns))
        return checkpoints
