"""Job files for jobs and job functions of a script or a notebook."""

from __future__ import annotations

import base64
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.words import one_line
from ..errors import JobError
from ..plan.job import Job

JobSource = Job | Callable[..., Job] | str | os.PathLike[str]

_FILE = """# Written by mpitrain: the job function {name}, from {origin}.

import base64
import sys

import cloudpickle

sys.path[:0] = {paths!r}  # before the folder of this file: the file may have the name of a module
job = cloudpickle.loads(
    base64.b85decode(
        "{pickled}"
    )
)
"""


def job_file_text(job: Job | Callable[..., Job]) -> tuple[str, str]:
    """Return the name of a job, and the text of a job file that makes it. Local.

    The file contains the function, pickled by value if ranks cannot import it.

    Raises:
        JobError: ``job`` is neither a Job nor a function, or cannot be pickled.
    """
    import cloudpickle

    if isinstance(job, Job):
        name, function = "job", _with_evaluated_annotations(job_function(job))
    elif inspect.isfunction(job):
        name = job.__name__ if job.__name__.isidentifier() else "job"  # such as <lambda>
        function = _with_evaluated_annotations(job)
    else:
        raise JobError(f"{job!r} is not a job: must be the path of a job file, a function that returns a Job, or a Job")
    try:
        pickled = cloudpickle.dumps(function)
    except Exception as error:
        reason = one_line(error)
        raise JobError(
            f"the job {name} cannot be sent to the ranks: {type(error).__name__}: {reason}; make objects that cannot "
            "be pickled inside the job function"
        ) from error
    paths = [str(Path(path).absolute()) for path in sys.path if path not in _standard_paths()]
    origin = inspect.getsourcefile(job) if inspect.isfunction(job) else None
    text = _FILE.format(
        name=name, origin=repr(origin or "an object"), paths=paths, pickled=base64.b85encode(pickled).decode()
    )
    return name, text


def job_function(made: Job) -> Callable[[], Job]:
    """Return a job function, without parameters, that returns this job."""

    def job() -> Job:
        return made

    return job


def _with_evaluated_annotations(function: Any) -> Any:
    """Return the function with types in place of types' names in its annotations; ranks could not resolve the names."""
    if not any(isinstance(annotation, str) for annotation in function.__annotations__.values()):
        return function
    parts = (function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy = types.FunctionType(*parts)
    copy.__kwdefaults__, copy.__doc__, copy.__module__ = function.__kwdefaults__, function.__doc__, function.__module__
    try:
        copy.__annotations__ = typing.get_type_hints(function)
    except Exception as error:
        raise JobError(f"the annotations of the job {function.__name__} cannot be read: {error}") from error
    return copy


def _standard_paths() -> set[str]:
    """Return the entries of the import path that the ranks have, too."""
    prefixes = {sys.prefix, sys.base_prefix}
    return {path for path in sys.path if any(Path(path).is_relative_to(prefix) for prefix in prefixes)}
