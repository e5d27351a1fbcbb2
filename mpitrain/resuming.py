"""Which checkpoint a run begins with. Local; nothing of its values is read for good here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from . import checkpoint
from .config import RunConfig
from .errors import CheckpointError, DamagedCheckpoint
from .params import Layout


class Beginning(NamedTuple):
    """Where a run begins.

    Attributes:
        resume: The checkpoint to go on from, or None.
        init_from: The checkpoint whose parameters to take as far as they fit, or None.
        notes: Lines for the user.
        saved: Whether ``resume`` is one of the run's own, which need not be saved again.
    """

    resume: Path | None
    init_from: Path | None
    notes: list[str]
    saved: bool


def find_beginning(config: RunConfig, checkpoints: Path, layout: Layout) -> Beginning:
    """Look for the checkpoint that ``--resume`` and ``--init-from`` ask for, as the folder is now.

    Args:
        checkpoints: The run's own.

    Raises:
        CheckpointError: There is no such checkpoint, or none that is whole, or nothing of it fits the model.
    """
    resume, notes = _find(config.resume, checkpoints, config.keep)
    saved = resume is not None and resume.resolve().parent == checkpoints.resolve()
    if config.init_from is None:
        return Beginning(resume, None, notes, saved)
    if resume is not None:
        return Beginning(resume, None, [*notes, f"--init-from is left out: the run goes on from {resume}"], saved)
    _check("--init-from", config.init_from)
    fit = checkpoint.fit_of(config.init_from, layout)
    rest = f"; {fit}" if fit.wrong else ""
    notes.append(f"{len(fit.fitting):,} of {len(layout.entries):,} parameters are those of {config.init_from}{rest}")
    return Beginning(None, config.init_from, notes, False)


def _find(resume: str, checkpoints: Path, keep: int) -> tuple[Path | None, list[str]]:
    if resume == "never":
        if keep and checkpoint.newest(checkpoints) is not None:
            raise CheckpointError(
                f"{checkpoints} holds checkpoints of another run, and --keep {keep} would remove this one's before "
                "those of higher steps: give another --run-dir, or leave --keep or --resume never out"
            )
        return None, []
    if resume != "auto":
        _check("--resume", Path(resume), "auto, never or ")
        return Path(resume), []
    newest, passed_over = checkpoint.newest_whole(checkpoints)
    if newest is None and passed_over:
        raise CheckpointError(
            f"none of the {len(passed_over)} checkpoints in {checkpoints} is whole: {passed_over[0]}; "
            "give --resume never to begin anew, or another --run-dir"
        )
    return newest, [f"passed over: {why}" for why in passed_over]


def _check(option: str, path: Path, else_give: str = "") -> None:
    """Make sure that what the user named is a checkpoint; its values are checked when they are read."""
    if not path.is_file():
        raise CheckpointError(f"{option} {path}: no such checkpoint; give {else_give}a checkpoint's path")
    try:
        with checkpoint.Checkpoint(path):
            pass
    except DamagedCheckpoint as error:
        raise CheckpointError(f"{option} {error}; give {else_give}another checkpoint's path") from error
