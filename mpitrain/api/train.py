"""``train``: train a job inside a script that a launcher has started on every rank, or alone."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError, JobError
from ..plan.config import FIELDS
from ..plan.job import Job, load_job_file, make_job
from ..plan.options import run_config, without_overridden
from ..plan.request import unknown_name
from ..process.signals import STOPPED_EARLY
from ..training.script_rank import ScriptRank
from ..training.session import training_session
from ..training.setup import TrainRequest
from .job_source import JobSource, job_function
from .run import Run


def train(job: JobSource, **options: Any) -> Run:
    """Train a job on the ranks of this script, and return the run. Collective over all ranks.

    Start the script with ``mpitrain run``, ``mpirun`` or ``srun``. Without a launcher, it trains on one rank. Flags
    before the script in ``mpitrain run FLAGS script.py`` replace ``options``.

    If a signal or a time limit stops the run, it saves, and the script exits with status 75.

    Args:
        job: A ``Job``, a function that returns a ``Job``, or the path of a job file.
        options: The flags of ``mpitrain train``, such as ``mode="async", ps=1``, and the parameters of the function.

    Raises:
        UserError: On a single rank without a launcher: an argument or the job is not valid. Otherwise the error is
            printed, and all ranks exit.
    """
    rank = ScriptRank.of_process()
    with rank.errors_end_the_run():
        with rank.cluster.agree("reading the options"):
            request = _request(job, options, rank.options)
        rank.claim_run_dir(request.config)
        with training_session(rank.cluster, request, rank.status) as session:
            if session.loop is not None:
                session.loop.run()
    rank.finish(session.stopped)
    if session.stopped:
        sys.exit(STOPPED_EARLY)
    run = Run(session.run_dir)
    run._make_job = request.make  # loading the script as a job file would start training again
    return run


def script_path() -> Path:
    """Return the path of the running script; in an interactive session, of a file that does not exist."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "interactive.py")


def _request(job: JobSource, options: dict[str, Any], on_command_line: dict[str, Any]) -> TrainRequest:
    """Return the request for a job; the options ``on_command_line`` take precedence."""
    of_run = {name: value for name, value in options.items() if name in FIELDS}
    config = run_config(without_overridden(of_run, on_command_line) | on_command_line)
    arguments = {name: value for name, value in options.items() if name not in FIELDS}
    path = script_path()
    if isinstance(job, (str, os.PathLike)):
        path = Path(job)
        function = load_job_file(path)
    elif isinstance(job, Job):
        function = job_function(job)
    elif inspect.isfunction(job):
        function = job
    else:
        raise JobError(f"{job!r} is not a job: must be a Job, a function that returns one, or the path of a job file")
    arguments = _bound(function, arguments)
    seed = config.training.seed
    return TrainRequest(path, arguments, config, lambda: make_job(path, function, arguments, seed))


def _bound(function: Callable[..., Job], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a job function, with its defaults.

    Raises:
        ConfigError: The arguments do not match the function's parameters.
    """
    signature = inspect.signature(function)
    try:
        bound = signature.bind(**arguments)
    except TypeError as error:
        unknown = [name for name in arguments if name not in signature.parameters]
        if not unknown:
            raise ConfigError(f"the job function {function.__name__}: {error}") from error
        raise unknown_name(unknown[0], [*FIELDS, *signature.parameters]) from error
    bound.apply_defaults()
    return dict(bound.arguments)
