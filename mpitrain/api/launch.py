"""``launch`` and ``submit`` start runs from scripts and notebooks."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from ..core.files import replace_file
from ..errors import ConfigError, LaunchError
from ..launcher.batch.request import submit_request
from ..launcher.batch.submit import submit_one
from ..launcher.preparation import prepare
from ..plan.request import JobRequest, Workload, launch_request
from ..process.launcher_env import is_launched
from ..process.run_directory import launcher_of, make_run_dir, remove_empty
from .job_source import JobSource, job_file_text
from .run import Run

Command: TypeAlias = "list[str] | tuple[str, ...]"  # the words of a command
Target: TypeAlias = "Path | Sequence[str]"  # a file, or the words of a command
_COMMAND_LINE_FLAGS = ("dry_run", "follow", "sweep", "array")  # flags that are not arguments in Python


def launch(
    job: JobSource | Command, *, ranks: int | None = None, run_dir: str | os.PathLike[str] | None = None, **options: Any
) -> Run:
    """Start ranks that train a job or execute a program, as ``mpitrain run`` does, and return immediately.

    The run continues if this process ends; ``Run(path)`` finds it again.

    Args:
        job: The path of a job file, a function that returns a ``Job``, or a ``Job``. The function may be defined in a
            notebook. A ``Job`` is copied to every rank with its data. Also the path of any other Python script, or a
            command as a list, such as ``["python", "train.py"]``.
        ranks: Number of ranks; by default as many as ``hosts`` or the allocation have, else 1.
        run_dir: The directory in which the run writes, and from which it resumes; ``runs/JOB-TIME`` by default.
        options: The flags of ``mpitrain run``, such as ``mode="async", ps=1``, and the parameters of the job function,
            or the flags of the script.

    Raises:
        UserError: An argument is not valid; nothing was started.
    """
    if is_launched(os.environ):
        raise LaunchError("mpitrain.launch was called on a rank of a run: call mpitrain.train there")

    def start(values: Mapping[str, Any], target: Target, text: str | None) -> Run:
        request = launch_request(target, values, is_job=text is not None)
        prepare(request)
        with _run_dir(request.workload, run_dir) as folder:
            run = Run(folder)
            run._start(replace(request, workload=_in_run_dir(request.workload, folder, text)).words)
            return run

    return _with_target(job, {"ranks": ranks, **options}, start)


def submit(job: JobSource | Command, *, run_dir: str | os.PathLike[str] | None = None, **options: Any) -> Run:
    """Submit a batch job that trains or executes a program, as ``mpitrain submit`` does, and return immediately.

    Args:
        job: See ``launch``.
        run_dir: The directory in which the run writes, and from which it resumes; ``runs/JOB-TIME`` by default.
        options: The flags of ``mpitrain submit``, such as ``nodes=2, time="1:00:00", scheduler="slurm"``, and the
            parameters of the job function.

    Raises:
        UserError: An argument is not valid, or the scheduler rejects the job.
    """

    def start(values: Mapping[str, Any], target: Target, text: str | None) -> Run:
        request = submit_request(target, values, is_job=text is not None)
        with _run_dir(request.workload, run_dir) as folder:
            run = Run(folder)
            run._skip_output()
            submit_one(replace(request, workload=_in_run_dir(request.workload, folder, text)))
            return run

    return _with_target(job, options, start)


def _with_target(
    job: JobSource | Command, options: Mapping[str, Any], start: Callable[[Mapping[str, Any], Target, str | None], Run]
) -> Run:
    """Call ``start`` with the options, the file or command, and the text of the file if it is generated."""
    for name in _COMMAND_LINE_FLAGS:
        if name in options:
            raise ConfigError(f"{name}={options[name]!r} is available on the command line only; remove the argument")
    if isinstance(job, (str, os.PathLike)):
        with _import_path():
            return start(options, Path(job), None)
    if isinstance(job, (list, tuple)):
        return start(options, [os.fspath(word) for word in job], None)
    name, text = job_file_text(job)
    with tempfile.TemporaryDirectory() as folder, _import_path():
        path = Path(folder) / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        return start(options, path, text)


@contextlib.contextmanager
def _import_path() -> Iterator[None]:
    """Restore the import path afterwards: loading a job file adds the file's folder to it."""
    before = sys.path[:]
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def _run_dir(workload: Workload, path: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Yield the run directory; after an error remove the folders that were created for it and are still empty.

    Raises:
        LaunchError: The directory cannot be written, or a process on this host is using it.
    """
    folder, made = make_run_dir(workload.name, None if path is None else Path(path), workload.join)
    try:
        launcher = launcher_of(folder)
        if launcher is not None and launcher.is_local:
            raise LaunchError(f"{folder} is in use by process {launcher.pid}; wait for it, or pass another run_dir")
        yield folder
    except BaseException:
        remove_empty(made)
        raise


def _in_run_dir(workload: Workload, folder: Path, text: str | None) -> Workload:
    """Return the request with this run directory; ``text`` is the text of a job file to write there, if any."""
    job = workload.with_options(run_dir=folder)
    if text is None or not isinstance(job, JobRequest):
        return job
    path = folder / job.path.name
    replace_file(path, text.encode())
    return replace(job, path=path)
