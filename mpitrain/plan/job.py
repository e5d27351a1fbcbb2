"""``Job``, the description of what to train; a job file's function ``job`` returns one."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from .. import nn, optim
from ..data import Split
from ..data.split import sample_digest
from ..errors import DataError, JobError, UserError
from ..nn.layer import Layer, walk
from ..nn.loss import Loss
from ..optim import Optimizer, moving_average
from .hook import Hook
from .placement import Pins

_EXAMPLES: dict[type, str] = {
    Layer: ", such as nn.Sequential(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 2))",
    Loss: ", such as nn.SoftmaxCrossEntropy()",
    Optimizer: ", such as optim.adam(0.001)",
    Split: "; for arrays use data.from_arrays(examples, labels)",
    Sequence: " of hooks, such as [MyHook()]",
    Hook: ", such as MyHook()",
}
_HOOK_METHODS = [name for name, method in vars(Hook).items() if inspect.isfunction(method)]
_LAYER_METHODS = ["build", "forward", "backward"]


@dataclass
class Job:
    """A model and everything needed to train it.

    Attributes:
        model: Takes a batch of examples, shape (batch, *train.shape).
        loss: Takes the model's outputs and the labels.
        optimizer: Updates the parameters.
        train: Examples to train on.
        validation: Examples to measure on, or None.
        batch_size: Examples per worker and step; ``--batch-size`` overrides it.
        train_steps: Number of training steps; ``--train-steps`` overrides it.
        moving_average: Moving average of the parameters, used for validation, or None.
        hooks: Called by the training loop, in addition to the built-in ones.
        pins: With parameter servers: maps a variable's name to its server (from 0), or a function of name, shape and
            bytes that returns the server, or None to leave the choice to ``--placement``.
        line: The line of the job file that made this object, for errors.
    """

    model: Layer
    loss: Loss
    optimizer: Optimizer
    train: Split
    validation: Split | None = None
    batch_size: int = 100
    train_steps: int = 1000
    moving_average: moving_average | None = None
    hooks: Sequence[Hook] = ()
    pins: Pins | None = None
    line: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.line = sys._getframe(2).f_lineno  # of the caller of ``__init__``
        wanted: dict[str, type] = {"model": Layer, "loss": Loss, "optimizer": Optimizer, "train": Split}
        for name, kind in wanted.items():
            self._check(name, getattr(self, name), kind)
        optional: dict[str, type] = {"validation": Split, "moving_average": moving_average}
        for name, kind in optional.items():
            if getattr(self, name) is not None:
                self._check(name, getattr(self, name), kind)
        for name in ("batch_size", "train_steps"):
            self._check(name, getattr(self, name), int)
        for kind in {type(layer) for _, layer in walk(self.model)}:
            _check_methods("model", Layer, kind, _LAYER_METHODS)
        self._check("hooks", self.hooks, Sequence)
        for hook in self.hooks:
            self._check("hooks", hook, Hook)
            _check_methods("hooks", Hook, type(hook), _HOOK_METHODS)

    def _check(self, name: str, value: object, kind: type) -> None:
        if not isinstance(value, kind) or isinstance(value, bool):
            given = textwrap.shorten(_without_address(repr(value)), 80)  # the text of an array has many lines
            valid = f"{kind.__name__}{_EXAMPLES.get(kind, '')}"
            raise JobError(f"Job({name}=...) got {given}: must be {valid}")

    def facts(self) -> dict[str, object]:
        """Return what must be the same on every rank, except the model.

        Raises:
            DataError: A data file does not match its header.
        """
        splits = {"training": self.train, "validation": self.validation}
        return {
            "loss": type(self.loss).__name__,
            "optimizer": _without_address(repr(self.optimizer)),
            "number of training examples": len(self.train),
            "shape of an example": self.train.shape,
            "number of validation examples": 0 if self.validation is None else len(self.validation),
            "moving average": self.moving_average,
            "hooks": [type(hook).__name__ for hook in self.hooks],
            **{
                f"the {name} examples (a digest of some)": sample_digest(split)
                for name, split in splits.items()
                if split is not None
            },
        }


def _check_methods(option: str, base: type, kind: type, names: Sequence[str]) -> None:
    """Check that methods of ``kind``, which may be the user's, take the arguments of the class ``base``."""
    for name in names:
        wanted, given = list(inspect.signature(getattr(base, name)).parameters), inspect.signature(getattr(kind, name))
        try:
            given.bind(*wanted)
        except TypeError:
            takes = f"{kind.__name__}.{name} takes {given}"
            raise JobError(f"Job({option}=...): {takes}: must take ({', '.join(wanted)})") from None


def _without_address(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # it differs between ranks


JobFunction = Callable[..., Job]
_NO_ARGPARSE = "remove its parser: the parameters of 'def job(...)' become flags"


def load_job_file(path: Path) -> JobFunction:
    """Run a job file and return its function ``job``.

    Raises:
        JobError: The file does not exist, raises, or defines no ``job``.
    """
    if not path.is_file():
        nearby = ", ".join(sorted(str(p) for p in path.parent.glob("*.py"))[:8]) if path.parent.is_dir() else ""
        hint = f"; found {nearby}" if nearby else ""
        raise JobError(f"no job file {str(path)!r}{hint}")
    if path.suffix != ".py":
        raise JobError(f"{str(path)!r} is not a job file: must be a Python file that defines 'job'")
    spec = importlib.util.spec_from_file_location(f"mpitrain_job_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # So that job files can share code. The console command does not search the current directory, ``python -m`` does.
    sys.path[:0] = [str(path.parent.resolve()), str(Path.cwd())]
    with _errors_described(path):
        spec.loader.exec_module(module)
    return _job_function(path, module)


def _job_function(path: Path, module: ModuleType) -> JobFunction:
    function = getattr(module, "job", None)
    if not inspect.isfunction(function):
        found = sorted(n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__)
        found_text = f"it defines {', '.join(found)}" if found else "it defines no function"
        raise JobError(f"job file {path} has no function 'job' that returns a Job; {found_text}")
    return function


def make_job(path: Path, function: JobFunction, arguments: dict[str, Any]) -> Job:
    """Call a job file's function and return its job.

    Raises:
        JobError: The function raises, or does not return a Job.
    """
    with _errors_described(path):
        job = function(**arguments)
    if not isinstance(job, Job):
        raise JobError(f"'job' in {path} returned {type(job).__name__}: must return a Job")
    return job


@contextlib.contextmanager
def errors_located(path: Path, job: Job) -> Iterator[None]:
    """Name the line of the job file in errors of its job: the line that raised the error, or that made the job."""
    try:
        yield
    except (JobError, DataError) as error:
        located = type(error)(f"{_place(path, error) or f'job file {path}, line {job.line}'}: {error}")
        located.on_all_ranks = error.on_all_ranks
        raise located from error


@contextlib.contextmanager
def _errors_described(path: Path) -> Iterator[None]:
    """Turn exceptions of the job file's code into a ``JobError``, and name its line in errors of this package.

    Its own ``argparse`` would print its usage, and exit, because it cannot parse the arguments of ``mpitrain``.
    """

    def refuse(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise JobError(f"job file {path} parses the command line with argparse ({message}); {_NO_ARGPARSE}")

    error_of_argparse = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = refuse  # type: ignore[method-assign]
    try:
        yield
    except UserError as error:
        if not (place := _place(path, error)):
            raise
        raise type(error)(f"{place}: {error}") from error
    except (Exception, SystemExit) as error:
        raise JobError(_describe(path, error)) from error
    finally:
        argparse.ArgumentParser.error = error_of_argparse  # type: ignore[method-assign]


def _describe(path: Path, error: BaseException) -> str:
    """Return the error as one line, with the line of the job file that raised it."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    place = _place(path, error) or f"job file {path}"
    text = " ".join(str(error).split())
    hint = f"; if it parses the command line, {_NO_ARGPARSE}" if isinstance(error, SystemExit) else _suggestion(error)
    return f"{place}: {type(error).__name__}{': ' if text else ''}{text}{hint}"


def _suggestion(error: BaseException) -> str:
    """Return the valid name that is most similar to the one that the error is about; empty if there is none."""
    unknown, known = getattr(error, "name", None), list[str]()
    if isinstance(error, AttributeError):
        known = [*(getattr(error.obj, "__all__", None) or dir(error.obj))]
    elif isinstance(error, NameError) and error.__traceback__ is not None:
        frame = traceback.walk_tb(error.__traceback__)
        scope = [*frame][-1][0]
        known = [*scope.f_locals, *scope.f_globals]
    elif isinstance(error, ImportError) and (found := re.match(r"cannot import name '(\w+)'", str(error))):
        unknown, known = found[1], [*getattr(sys.modules.get(str(error.name)), "__all__", ())]
    elif found := re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error)):
        places = (sys.modules[__name__], nn, optim)
        kind = next((getattr(place, found[1]) for place in places if hasattr(place, found[1])), None)
        unknown, known = found[2], [] if kind is None else [*inspect.signature(kind).parameters]
    by_lower = {name.lower(): name for name in known}
    similar = difflib.get_close_matches((unknown or "").lower(), by_lower, 1)
    return f"; did you mean {by_lower[similar[0]]!r}?" if similar else ""


def _place(path: Path, error: BaseException) -> str:
    """Return the line of the job file in which the error was raised; empty if it was raised elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"job file {path}, line {lines[-1]}" if lines else ""
