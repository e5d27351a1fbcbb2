"""Which checkpoints a run may begin with. Local; nothing of their values is read here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .. import checkpoint
from ..core.layout import Layout
from ..errors import CheckpointError, DamagedCheckpoint
from ..plan.config import RunConfig


class ResumePlan(NamedTuple):
    """Where a run begins.

    Attributes:
        resume: Checkpoints to go on from: the first of them that turns out whole as it is read. None to begin anew.
        init_from: The checkpoint whose parameters to take as far as they fit, or None.
        notes: Lines for the user.
        saved: Whether ``resume`` are of the run's own, which need not be saved again.
        auto: Whether ``resume`` are all that there are, the newest first, and not the one that the user named.
    """

    resume: tuple[Path, ...] = ()
    init_from: Path | None = None
    notes: tuple[str, ...] = ()
    saved: bool = False
    auto: bool = False


def plan_resume(config: RunConfig, checkpoints: Path, layout: Layout) -> ResumePlan:
    """Look for the checkpoints that ``--resume`` and ``--init-from`` ask for, as the folder is now.

    Args:
        checkpoints: The run's own.

    Raises:
        CheckpointError: There is no such checkpoint, or nothing of it fits the model.
    """
    auto = config.resume == "auto"
    resume = tuple(checkpoint.steps(checkpoints).values()) if auto else _asked_for(config, checkpoints)
    saved = bool(resume) and resume[0].resolve().parent == checkpoints.resolve()
    begin = ResumePlan(resume, saved=saved, auto=auto)
    if config.init_from is None:
        return begin
    if resume:
        from_where = f"its own checkpoints in {checkpoints}" if auto else str(resume[0])
        return begin._replace(notes=(f"--init-from is left out: the run goes on from {from_where}",))
    _check("--init-from", config.init_from)
    fit = checkpoint.match_of(config.init_from, layout)
    rest = f"; {fit}" if fit.wrong else ""
    note = f"{len(fit.fitting):,} of {len(layout.entries):,} parameters are those of {config.init_from}{rest}"
    return begin._replace(init_from=config.init_from, notes=(note,))


def _asked_for(config: RunConfig, checkpoints: Path) -> tuple[Path, ...]:
    if config.resume != "never":
        _check("--resume", Path(config.resume), "auto, never or ")
        return (Path(config.resume),)
    if config.keep and checkpoint.newest(checkpoints) is not None:
        raise CheckpointError(
            f"{checkpoints} holds checkpoints of another run, and --keep {config.keep} would remove this one's before "
            "those of higher steps: give another --run-dir, or leave --keep or --resume never out"
        )
    return ()


def _check(option: str, path: Path, else_give: str = "") -> None:
    """Make sure that what the user named is a checkpoint; its values are checked when they are read."""
    if not path.is_file():
        raise CheckpointError(f"{option} {path}: no such checkpoint; give {else_give}a checkpoint's path")
    try:
        with checkpoint.Checkpoint(path):
            pass
    except DamagedCheckpoint as error:
        raise CheckpointError(f"{option} {error}; give {else_give}another checkpoint's path") from error
