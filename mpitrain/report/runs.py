"""``mpitrain runs``: a table of the runs in a folder."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import click

from ..batch_systems.base import JobState
from ..batch_systems.registry import SYSTEMS
from ..core.words import counted
from ..errors import ConfigError, RecordError
from ..monitor.console import print_wrapped
from ..monitor.format import amount, duration, format_table, metric, wrap
from ..monitor.heartbeat import BatchJob, State, age_s, read, states
from ..monitor.metrics import read_lines
from ..monitor.run_record import PROGRAM
from ..plan.metric import PREFIX, Goal, parse_goal
from ..plan.options import examples
from ..process.run_directory import LEARNERS
from .history import END_BYTES, METRICS, Run, is_run, read_run

_HEAD = ("run", "job", "mode", "ranks", "step", "best validation", "goodput", "state", "age")
# Columns that a narrow terminal does not show, in the order in which they are left out.
_LEAST_IMPORTANT = ("job", "ranks", "mode", "goodput", "age")
# Columns of the learners of a run, by the name of the number in their metrics.
_OF_LEARNERS = {
    "examples_per_s": "examples/s",
    "merged_contributions": "merged",
    "discarded_contributions": "discarded",
    "lag_versions": "lag",
}


@click.command("runs", epilog=examples("mpitrain runs --sort accuracy"))
@click.argument("folder", required=False, default=Path("runs"), type=click.Path(path_type=Path), metavar="[FOLDER]")
@click.option(
    "--sort",
    metavar="NAME",
    help="Sort by the best value of a metric, best first: loss, accuracy, or NAME:max or NAME:min for others, such as "
    "those of the job.",
)
def runs_command(folder: Path, sort: str | None) -> None:
    """List the runs in FOLDER (default: runs), newest first.

    If FOLDER is a run, its learners are listed, too, and what the time went into.
    """
    goal = None if sort is None else parse_goal("--sort", sort)
    run_dirs = [*find(folder), *learners_of(folder)]
    if not run_dirs:
        print(f"no runs in {folder}")
        return
    state = described_states(run_dirs)
    ages = {path: age_s(path) for path in run_dirs}
    runs = {path: _read(path) for path in sorted(run_dirs, key=lambda path: ages[path])}
    rows = {path: _row(path, run, folder, *state[path], ages[path]) for path, run in runs.items()}
    if goal is None and len(run_dirs) > 1 and is_run(folder):
        _print_table((*_HEAD, *_OF_LEARNERS.values()), [(*row, *_exchanged(runs[path])) for path, row in rows.items()])
    elif goal is None:
        _print_table(_HEAD, list(rows.values()))
    else:
        _print_table((*_HEAD, f"best {goal.name}"), _sorted(goal, runs, rows))
    if is_run(folder):
        for path, run in runs.items():
            if run is not None and (account := run.account) is not None:
                name = f"{rows[path][0]}: " if len(runs) > 1 else ""
                print(wrap(f"\n{name}{account.describe()}", _columns()))


def _columns() -> int:
    """Return the width of the terminal; 0 for other outputs."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _print_table(titles: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table; on a narrow terminal, some columns are left out, and named."""
    columns = _columns()
    hidden: list[str] = []
    while True:
        shown = [index for index, title in enumerate(titles) if title not in hidden]
        table = format_table([titles[index] for index in shown], [[row[index] for index in shown] for row in rows])
        left = [title for title in _LEAST_IMPORTANT if title not in hidden]
        if not columns or not left or max(map(len, table.splitlines())) <= columns:
            break
        hidden.append(left[0])
    print(table)
    if hidden:
        print(
            wrap(
                f"\nNot shown in {columns} columns: {', '.join(hidden)}; a wider terminal or a pipe shows all.", columns
            )
        )


def _sorted(goal: Goal, runs: Mapping[Path, Run | None], rows: Mapping[Path, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows with the best value of a metric, sorted by this value; runs without the metric are last.

    Raises:
        ConfigError: No run has the metric.
    """
    best = {path: None if run is None else run.best(goal) for path, run in runs.items()}
    values = {path: value[0] for path, value in best.items() if value is not None}
    if not values:
        names = dict.fromkeys(name for run in runs.values() if run is not None for name in run.further_names())
        further = "".join(f", {name.removeprefix(PREFIX)}" for name in names)
        raise ConfigError(f"--sort {goal.name}: no run has this metric; there are loss, accuracy{further}")
    ordered = sorted(values, key=lambda path: values[path], reverse=goal.is_higher_better)
    ordered += [path for path in rows if path not in values]
    return [(*rows[path], f"{values[path]:.6g}" if path in values else "-") for path in ordered]


def _read(path: Path) -> Run | None:
    """Return a run; None if it cannot be read."""
    try:
        return read_run(path)
    except RecordError:
        return None


def find(folder: Path) -> Iterator[Path]:
    """Yield the run directories in a folder, at any depth but not nested; the folder itself if it is a run directory.

    Raises:
        RecordError: The folder does not exist or cannot be listed.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such folder; give a folder that contains run directories")
    if is_run(folder):
        yield folder
        return
    try:
        children = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError as error:
        raise RecordError(f"{folder} cannot be listed: {error.strerror}") from error
    for child in children:
        yield from find(child)


def learners_of(run: Path) -> list[Path]:
    """Return the run directories of the learners that have joined a run."""
    return list(find(run / LEARNERS)) if (run / LEARNERS).is_dir() else []


def learner_lines(run: Path) -> list[str]:
    """Return a table of the learners that have joined a run, as lines; none if there are none.

    The state is the recorded one, with the time since it was recorded: a learner that was killed has not recorded it.
    """
    rows = []
    for folder in learners_of(run):
        if (status := read(folder)) is not None:
            newest = Run(folder, {}, read_lines(folder / METRICS, END_BYTES))
            numbers = (f"{status.step:,}", *_exchanged(newest))
            rows.append((folder.name, status.ranks, *numbers, f"{status.state}, {duration(age_s(folder))} ago"))
    titles = ("learner", "ranks", "step", *_OF_LEARNERS.values(), "state")
    return format_table(titles, rows).splitlines() if rows else []


def _exchanged(run: Run | None) -> tuple[str, ...]:
    """Return the columns of a learner that say what it has exchanged."""
    values = [None if run is None else run.newest(name) for name in _OF_LEARNERS]
    return tuple("-" if value is None else amount(value) for value in values)


def latest_run(folder: Path = Path("runs")) -> Path:
    """Return the run directory in a folder that has changed last, and print its name; for commands without RUN.

    Raises:
        RecordError: The folder has no run.
    """
    run_dirs = list(find(folder)) if folder.is_dir() else []
    if not run_dirs:
        raise RecordError(f"no RUN is given, and there are no runs in {folder}; give a run directory")
    latest = min(run_dirs, key=age_s)
    print_wrapped(f"mpitrain: no RUN is given; using the latest run, {latest}")
    return latest


def described_states(folders: Sequence[Path]) -> dict[Path, tuple[State, str]]:
    """Return the state of each run, and a description that includes the batch job of a run without a step.

    A run that ends before its first step may not have recorded its end. The batch system of its job is then queried,
    once for all runs.
    """
    state_of = states(folders)
    jobs = {folder: job for folder, state in state_of.items() if (job := _job_without_step(folder, state)) is not None}
    ends = _ends(jobs.values())
    return {folder: _describe(state, jobs.get(folder), ends) for folder, state in state_of.items()}


def _ends(jobs: Collection[BatchJob]) -> dict[tuple[str, str], JobState]:
    """Return the final states of the jobs that have ended, by the scheduler and the job id."""
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
    """Return the best validation accuracy, or loss if there is no accuracy, with its step; ``-`` if there is none."""
    for name in ("accuracy", "loss"):
        if len(run.series(PREFIX + name)) and (best := run.best(parse_goal("", name))) is not None:
            return f"{name} {metric(best[0])} at {best[1]:,}"
    return "-"


def _row(path: Path, run: Run | None, folder: Path, state: State, description: str, age: float) -> tuple[str, ...]:
    status = read(path)
    name = str(path.relative_to(folder)) if path != folder else path.resolve().name
    if run is None:
        return (name, "?", "?", "?", "?", "cannot be read", "-", description, duration(age))
    step = max(run.step, status.step if status is not None else 0)
    if state == "died":
        step = max(step, _saved_step(path))  # the run may have died before its first metrics line and second heartbeat
    mode = str(run.option("mode") or "?")
    if run.restarts:
        description += f", {counted(run.n_restarts, 'restart')}"
    job = status.job.name if status is not None and status.job is not None and not run.config else run.job
    ranks = status.ranks if status is not None else "?"
    share = "-" if (account := run.account) is None else f"{100 * account.goodput:.0f} %"
    return (name, job, mode, ranks, _progress(step, run), best_validation(run), share, description, duration(age))


def _saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    steps = (path.stem.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*.h5"))
    return max((int(step) for step in steps if step.isdecimal()), default=0)  # the other files are shards


def _progress(step: int, run: Run) -> str:
    """Return the step and, if known, the number of all steps; ``-`` for a program that has reported no step."""
    if run.option("mode") == PROGRAM and not step:
        return "-"
    goal = run.train_steps
    return f"{step:,}/{goal:,}" if goal is not None else f"{step:,}"
