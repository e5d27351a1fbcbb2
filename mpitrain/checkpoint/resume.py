"""Decide which checkpoints a run may start from. Local; values of checkpoints are not read here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .. import checkpoint
from ..core.layout import Layout
from ..errors import CheckpointError, DamagedCheckpoint
from ..plan.config import RunConfig
from .weights import is_torch_file


class ResumePlan(NamedTuple):
    """Where a run starts.

    Attributes:
        resume: Checkpoints to resume from, in order; the first undamaged one is used. Empty to start from the
            beginning.
        init_from: The checkpoint from which to load matching parameters, or None.
        notes: Lines for the user.
        saved: Whether ``resume`` are the run's own checkpoints, which need not be saved again.
        auto: Whether ``resume`` are all checkpoints, newest first, rather than one named by the user.
        step: The step of the first of ``resume``; -1 if there is none.
        finished: Whether training has finished, so that nothing is left to do.
        lost_step: The last known step of an earlier start, if there is no checkpoint; 0 if there was no earlier start.
    """

    resume: tuple[Path, ...] = ()
    init_from: Path | None = None
    notes: tuple[str, ...] = ()
    saved: bool = False
    auto: bool = False
    step: int = -1
    finished: bool = False
    lost_step: int = 0


def plan_resume(config: RunConfig, checkpoints: Path, layout: Layout) -> ResumePlan:
    """Find the checkpoints requested by ``--resume`` and ``--init-from``, as of now.

    Args:
        config: The run's options.
        checkpoints: The run's checkpoint directory.
        layout: The model's layout.

    Raises:
        CheckpointError: There is no such checkpoint, or none of its parameters fits the model.
    """
    auto = config.run.resume == "auto"
    by_step = checkpoint.steps(checkpoints) if auto else _requested(config, checkpoints)
    resume = tuple(by_step.values())
    saved = bool(resume) and resume[0].resolve().parent == checkpoints.resolve()
    begin = ResumePlan(resume, saved=saved, auto=auto, step=next(iter(by_step), -1))
    if config.training.init_from is None:
        return begin
    if resume:
        from_where = f"its own checkpoints in {checkpoints}" if auto else str(resume[0])
        return begin._replace(notes=(f"--init-from has no effect: the run resumes from {from_where}",))
    init_from = config.training.init_from
    if not is_torch_file(init_from):
        init_from = _find("--init-from", init_from)
    fit = checkpoint.match_of(init_from, layout)
    rest = f"; {fit}" if fit.wrong else ""
    note = f"{len(fit.fitting):,} of {len(layout.entries):,} parameters loaded from {init_from}{rest}"
    return begin._replace(init_from=init_from, notes=(note,))


def _requested(config: RunConfig, checkpoints: Path) -> dict[int, Path]:
    """Return the checkpoint that the user named, by its step."""
    if config.run.resume != "never":
        path = _find("--resume", Path(config.run.resume), ", or auto or never")
        with checkpoint.Checkpoint(path) as opened:
            return {opened.step: path}
    if config.saving.keep and checkpoint.newest(checkpoints) is not None:
        raise CheckpointError(
            f"{checkpoints} contains checkpoints of another run with higher steps, so --keep {config.saving.keep} "
            "would remove the checkpoints of this run first; pass another --run-dir, or remove --keep or --resume never"
        )
    return {}


def _find(option: str, path: Path, alternatives: str = "") -> Path:
    """Return the checkpoint that the user named, or the newest of a run directory.

    Its values are verified when they are read.
    """
    try:
        checkpoint_path = checkpoint.find(path)[0]
    except CheckpointError as error:
        raise CheckpointError(f"{option} {error}{alternatives}") from error
    try:
        with checkpoint.Checkpoint(checkpoint_path):
            return checkpoint_path
    except DamagedCheckpoint as error:
        raise CheckpointError(f"{option} {error}; give another checkpoint{alternatives}") from error
