"""``mpitrain runs``: a table of the runs in a folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import click

from ..batch_systems.base import JobState
from ..batch_systems.registry import SYSTEMS
from ..errors import RecordError
from ..monitor.format import duration, format_table
from ..monitor.heartbeat import BatchJob, State, Status, age_s, read, states
from .history import Run, is_run, read_run

_HEAD = ("run", "job", "mode", "ranks", "step", "best validation", "state", "age")


@click.command("runs")
@click.argument("folder", required=False, default=Path("runs"), type=click.Path(path_type=Path), metavar="[FOLDER]")
def runs_command(folder: Path) -> None:
    """List the runs in FOLDER (default: runs), newest first."""
    run_dirs = list(find(folder))
    if not run_dirs:
        print(f"no runs in {folder}")
        return
    state = described_states(run_dirs)
    ages = {path: age_s(path) for path in run_dirs}
    rows = [_row(path, folder, *state[path], ages[path]) for path in sorted(run_dirs, key=lambda path: ages[path])]
    print(format_table(_HEAD, rows))


def find(folder: Path) -> Iterator[Path]:
    """Yield the run directories in a folder, at any depth but not nested; the folder itself if it is one.

    Raises:
        RecordError: The folder does not exist or cannot be listed.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such folder; give one that contains run directories")
    if is_run(folder):
        yield folder
        return
    try:
        children = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError as error:
        raise RecordError(f"{folder} cannot be listed: {error.strerror}") from error
    for child in children:
        yield from find(child)


def described_states(folders: Sequence[Path]) -> dict[Path, tuple[State, str]]:
    """Return the state of each run, and a description that includes the batch job of a run without a step.

    Such a run could not record how it ended. Each batch system is asked once for the jobs of all of them.
    """
    state_of = states(folders)
    jobs = {folder: job for folder, state in state_of.items() if (job := _job_without_step(folder, state)) is not None}
    ends = _ends(jobs.values())
    return {folder: _describe(state, jobs.get(folder), ends) for folder, state in state_of.items()}


def _ends(jobs: Collection[BatchJob]) -> dict[tuple[str, str], JobState]:
    """Return how the jobs that have ended did so, by the scheduler and the job id."""
    job_states = {
        (name, job_id): state
        for name, system in SYSTEMS.items()
        for job_id, state in system.states(job.job_id for job in jobs if job.scheduler == name).items()
    }
    return {job: state for job, state in job_states.items() if state.has_ended}


def _job_without_step(folder: Path, state: State) -> BatchJob | None:
    status = read(folder) if state in ("submitted", "died") else None
    return None if status is None or status.step else status.job


def _describe(state: State, job: BatchJob | None, ends: Mapping[tuple[str, str], JobState]) -> tuple[State, str]:
    if job is None:
        return state, state
    end = ends.get((job.scheduler, job.job_id))
    if end is not None and state == "submitted":
        state = "died" if end.is_known else "unknown"
    return state, f"{state} (job {job.job_id}{f', {end.name}' if end is not None else ''})"


def best_validation(run: Run) -> str:
    """Return the best validation accuracy, or loss if there is no accuracy, with its step."""
    for name, shown, best in (("validation_accuracy", "accuracy", max), ("validation_loss", "loss", min)):
        series = run.series(name)
        values = [(v, s) for v, s in zip(series.values.tolist(), series.steps.tolist(), strict=True) if v == v]
        if values:
            value = best(v for v, _ in values)
            return f"{shown} {value:.4f} at {next(s for v, s in values if v == value):,}"
    return "-"


def _row(path: Path, folder: Path, state: State, description: str, age: float) -> tuple[str, ...]:
    status = read(path)
    name = str(path.relative_to(folder)) if path != folder else path.resolve().name
    try:
        run = read_run(path)
    except RecordError:
        return (name, "?", "?", "?", "?", "cannot be read", description, duration(age))
    step = max(run.step, status.step if status is not None else 0)
    if state == "died":
        step = max(step, _saved_step(path))  # it may have died before its first metrics line and second heartbeat
    mode = str(run.option("mode") or "?")
    job = status.job.name if status is not None and status.job is not None and not run.config else run.job
    return (name, job, mode, _ranks(status), _progress(step, run), best_validation(run), description, duration(age))


def _saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    steps = (path.stem.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*.h5"))
    return max((int(step) for step in steps if step.isdecimal()), default=0)  # other files are shards


def _ranks(status: Status | None) -> str:
    return status.ranks if status is not None else "?"


def _progress(step: int, run: Run) -> str:
    goal = run.option("train_steps")
    return f"{step:,}/{goal:,}" if isinstance(goal, int) else f"{step:,}"
