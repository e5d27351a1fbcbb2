"""``Job``, the description of what to train; a job file's function ``job`` returns one."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import nn, optim
from ..core.words import input_hint, one_line, suggestion
from ..data import Split
from ..data.split import Examples
from ..errors import DataError, JobError, UserError
from ..nn.layer import Layer, walk
from ..nn.loss import Loss
from ..optim import Optimizer, moving_average
from .config import FIELDS, RunConfig
from .hook import Hook
from .metric import MEASURED, Metric, check_metrics
from .network import Network, TorchLoss, TorchModule, TorchOptimizer, make_network, must_be, without_address
from .placement import Pins
from .script import functions_in, may_define_job

_HOOK_METHODS = [name for name, method in vars(Hook).items() if inspect.isfunction(method)]
_LAYER_METHODS = ["build", "forward", "backward"]


@dataclass
class Job:
    """A model and everything needed to train it.

    Attributes:
        model: Takes a batch of examples, shape ``(batch, *train.shape)``: layers, or a PyTorch module.
        loss: Takes the model's outputs and the labels. For a PyTorch module it is a torch loss, or a function that
            returns a tensor with one number, the mean over the batch. It is None if the module itself takes the labels
            and returns its loss: as a tensor, first in a tuple, or as ``loss`` of its outputs.
        optimizer: Updates the parameters: one of ``mpitrain.optim``. For a PyTorch module also one of ``torch.optim``,
            or a function that makes it from the parameters: ``lambda params: torch.optim.RMSprop(params, 0.01)``.
        train: Examples to train on: a split, or for a PyTorch module also an object with ``__len__`` and
            ``__getitem__``, such as a ``torch.utils.data.Dataset``. Its examples are tuples, inputs followed by the
            label, or dicts with ``labels``.
        validation: Examples for validation, or None.
        batch_size: Examples per worker and step; ``--batch-size`` overrides it.
        train_steps: Number of training steps; 1000 if neither steps nor epochs are set. ``--train-steps`` and
            ``--train-epochs`` override it.
        moving_average: Moving average of the parameters, used for validation, or None.
        hooks: Called by the training loop, in addition to the built-in hooks.
        pins: With parameter servers: a dict from variable names to servers (from 0), or a function of name, shape and
            bytes. The function returns the server, or None to leave the choice to ``--placement``.
        metrics: Functions of the outputs and labels of all validation examples by name, in addition to loss and
            accuracy: ``{"auc": lambda outputs, labels: roc_auc_score(labels, outputs[:, 1])}``. They get arrays (for a
            PyTorch module, tensors on the CPU), and return a number or a dict of numbers. Metrics of torchmetrics can
            be used in place of functions.
        train_epochs: Number of epochs to train, instead of ``train_steps``.
        virtual_workers: The workers of a step, which may be computed by fewer; ``--virtual-workers`` overrides it.
        source: The file and the line that made this object, for errors.

    Until the plan is made, a job file may replace fields by other objects: ``network`` is made again after ``model`` or
    ``loss`` was replaced, ``rule`` after ``optimizer``, and a split after ``train`` or ``validation``. Changes inside
    of an object are not noticed. Once the plan is made, replacements have no effect on the run.
    """

    model: Layer | TorchModule
    loss: Loss | TorchLoss | None
    optimizer: Optimizer | TorchOptimizer
    train: Split | Examples
    validation: Split | Examples | None = None
    batch_size: int = 100
    train_steps: int | None = None
    moving_average: moving_average | None = None
    hooks: Sequence[Hook] = ()
    pins: Pins | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    train_epochs: int | None = None
    virtual_workers: int | None = None
    source: tuple[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        caller = traceback.extract_stack(limit=3)[0]  # of ``__init__``
        self.source = caller.filename, caller.lineno or 0
        # By name: the user's objects, and what is made of them.
        self._made: dict[str, tuple[Sequence[object], Any]] = {}
        _ = self.train_split
        if self.validation is not None:
            self._split("validation")
        self._check("optimizer", self.rule, Optimizer)
        if self.moving_average is not None:
            self._check("moving_average", self.moving_average, moving_average)
        for name in [name for name in FIELDS if name in type(self).__dataclass_fields__]:
            if name == "batch_size" or getattr(self, name) is not None:
                self._check(name, getattr(self, name), int)
        if self.train_epochs is not None and self.train_epochs < 1:
            raise JobError(f"Job(train_epochs=...) is {self.train_epochs}, must be >= 1")
        if self.train_epochs is not None and self.train_steps is not None:
            raise JobError("Job: train_steps and train_epochs contradict each other; remove one")
        for kind in {type(layer) for _, layer in walk(self.model)} if isinstance(self.model, Layer) else ():
            _check_methods("model", Layer, kind, _LAYER_METHODS)
        check_metrics("Job(metrics=...)", self.metrics, MEASURED)
        self._check("hooks", self.hooks, Sequence)
        for hook in self.hooks:
            self._check("hooks", hook, Hook)
            _check_methods("hooks", Hook, type(hook), _HOOK_METHODS)

    def _made_of(self, name: str, objects: Sequence[object], make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns; it is called again only after one of the user's objects was replaced."""
        earlier = self._made.get(name)
        if earlier is None or any(a is not b for a, b in zip(earlier[0], objects, strict=True)):
            earlier = self._made[name] = objects, make()
        return earlier[1]

    def _check(self, name: str, value: object, kind: type) -> None:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise JobError(must_be(name, value, kind))

    def completed(self, config: RunConfig) -> RunConfig:
        """Return the options of a run, with this job's values for those that are None."""
        if self.virtual_workers and config.mode.uses_servers:
            raise JobError(
                f"Job(virtual_workers={self.virtual_workers}) requires --mode sync or local, but the mode is "
                f"{config.mode.name}: remove it, or change --mode"
            )
        values: dict[str, object] = {"batch_size": self.batch_size, "virtual_workers": self.virtual_workers}
        if config.training.train_steps is None and config.training.train_epochs is None:
            steps = 1000 if self.train_steps is None else self.train_steps
            values |= {"train_steps": steps} if self.train_epochs is None else {"train_epochs": self.train_epochs}
        return config.merged(values)

    @property
    def network(self) -> Network:
        """The model and its loss as the rest of the package uses them."""
        made: Network = self._made_of("network", (self.model, self.loss), lambda: make_network(self.model, self.loss))
        return made

    @property
    def rule(self) -> Optimizer:
        """The optimizer, translated if it is a PyTorch optimizer."""
        rule: Optimizer = self._made_of("rule", (self.optimizer,), lambda: self.network.rule_of(self.optimizer))
        return rule

    @property
    def train_split(self) -> Split:
        """The training examples."""
        return self._split("train")

    @property
    def validation_split(self) -> Split | None:
        """The validation examples, or None.

        Raises:
            DataError: The names of the classes, or their order, differ from those of the training examples.
        """
        if self.validation is None:
            return None
        split = self._split("validation")
        names, own = (getattr(one, "class_names", ()) for one in (self.train_split, split))
        if names and own and list(names) != list(own):
            lacking = [f"{split.source} lacks {name}" for name in names if name not in own]
            added = [f"{self.train_split.source} lacks {name}" for name in own if name not in names]
            raise DataError(
                f"the classes of {self.train_split.source} and {split.source} differ: "
                f"{', '.join((lacking + added)[:4]) or 'they have another order'}; both need the same folders"
            )
        return split

    @property
    def splits(self) -> dict[str, Split]:
        """The training split and, if there is one, the validation split, by name."""
        named = {"training": self.train_split, "validation": self.validation_split}
        return {name: split for name, split in named.items() if split is not None}

    def _split(self, name: str) -> Split:
        value = getattr(self, name)

        def make() -> Split:
            split = self.network.as_split(value)
            if not isinstance(split, Split):
                raise JobError(must_be(name, value, Split))
            if split.is_stream and name == "validation":
                raise JobError(f"Job(validation=...) got {split.source}: must be examples that can be read repeatedly")
            return split

        made: Split = self._made_of(name, (value,), make)
        return made

    def facts(self) -> dict[str, object]:
        """Return the properties that must be the same on every rank, except the layout of the model's parameters.

        Raises:
            DataError: A data file does not match its header.
        """
        return {
            **self.network.facts(),
            "optimizer": without_address(repr(self.rule)),
            "number of training examples": len(self.train_split),
            "shape of an example": self.train_split.shape,
            "order of the training examples": self.train_split.order_name,
            "number of validation examples": 0 if self.validation_split is None else len(self.validation_split),
            "moving average": self.moving_average,
            "metrics": [*self.metrics],
            "hooks": [type(hook).__name__ for hook in self.hooks],
            **{f"the {name} examples (a digest of some)": split.sample_digest() for name, split in self.splits.items()},
        }


def _check_methods(option: str, base: type, kind: type, names: Sequence[str]) -> None:
    """Check that these methods of ``kind``, a class that may be the user's, take the same arguments as in ``base``."""
    for name in names:
        wanted, signature = (
            list(inspect.signature(getattr(base, name)).parameters),
            inspect.signature(getattr(kind, name)),
        )
        try:
            signature.bind(*wanted)
        except TypeError:
            takes = f"{kind.__name__}.{name} takes {signature}"
            raise JobError(f"Job({option}=...): {takes}: must take ({', '.join(wanted)})") from None


JobFunction = Callable[..., Job]
_NO_ARGPARSE = "remove its parser: the parameters of 'def job(...)' become flags"


def load_job_file(path: Path) -> JobFunction:
    """Run a job file and return its function ``job``.

    Raises:
        JobError: The file does not exist, raises an exception, or defines no function ``job``.
    """
    if path.is_dir():
        raise JobError(f"{path} is a directory; give a Python file, such as {path / 'train.py'}, or a module after -m")
    if not path.is_file():
        nearby = ", ".join(sorted(str(p) for p in path.parent.glob("*.py"))[:8]) if path.parent.is_dir() else ""
        hint = f"; found {nearby}" if nearby else ""
        raise JobError(f"no file {str(path)!r}{hint}")
    if path.suffix != ".py":
        raise JobError(f"{str(path)!r} is not a job file: must be a Python file that defines 'job'")
    if not may_define_job(path):
        raise JobError(_without_job(path, functions_in(path)))
    spec = importlib.util.spec_from_file_location(f"mpitrain_job_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # Job files can import modules from their folder and from the current folder, which ``mpitrain`` does not search.
    sys.path[:0] = [str(path.parent.resolve()), str(Path.cwd())]
    gc.freeze()  # else the end of this process would examine the objects of all imported modules, for 0.2 s
    with _errors_described(path):
        spec.loader.exec_module(module)
    return _job_function(path, module)


def _job_function(path: Path, module: ModuleType) -> JobFunction:
    function = getattr(module, "job", None)
    if not inspect.isfunction(function):
        functions = {n: f for n, f in vars(module).items() if inspect.isfunction(f)}
        raise JobError(_without_job(path, sorted(n for n, f in functions.items() if f.__module__ == module.__name__)))
    return function


def _without_job(path: Path, functions: Sequence[str]) -> str:
    defines = f"it defines {', '.join(functions)}" if functions else "it defines no function"
    use = "a script must use mpitrain.train or mpitrain.Trainer"
    return f"job file {path} has no function 'job' that returns a Job, {defines}; {use}"


def make_job(path: Path, function: JobFunction, arguments: dict[str, Any], seed: int) -> Job:
    """Call a job file's function and return its job.

    If the file has imported torch, torch is seeded first. A module gets its initial values when it is made, and the
    values must be the same on all ranks. If only the function imports torch, the function is called a second time.

    Raises:
        JobError: The function raises an exception, or does not return a Job.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
    with _errors_described(path, function.__code__.co_filename):
        job = function(**arguments)
        if torch is None and (torch := sys.modules.get("torch")) is not None:  # the function has imported torch
            torch.manual_seed(seed)
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
        file, line = job.source
        made = f"{path if _is_same(file, path) else file}, line {line}"
        located = type(error)(f"{_place(path, error) or made}: {error}")
        located.on_all_ranks = error.on_all_ranks
        raise located from error


@contextlib.contextmanager
def _errors_described(path: Path, source: str = "") -> Iterator[None]:
    """Turn exceptions of the job file's code into a ``JobError``, and add the file's line to errors of this package.

    A command-line parser in the job file exits, because it does not define the arguments of ``mpitrain``.

    Args:
        source: The file of a function that a script or a notebook has passed.
    """
    try:
        yield
    except UserError as error:
        if not (place := _place(path, error, source)):
            raise
        raise type(error)(f"{place}: {error}") from error
    except (Exception, SystemExit) as error:
        raise JobError(_describe(path, error, source)) from error
    if getattr(sys.stdout, "closed", False):
        raise JobError(f"job file {path} closes sys.stdout, to which mpitrain prints")


def _describe(path: Path, error: BaseException, source: str) -> str:
    """Return the error as one line, with the line of the job file that raised it."""
    if isinstance(error, SyntaxError):
        line = "" if error.lineno is None else f", line {error.lineno}"  # a null byte has no line number
        return f"{error.filename or path}{line}: {error.msg}"
    place = (_place(path, error, source) or f"job file {path}") + _deeper_place(path, error, source)
    text = one_line(error)
    hint = f"; if it parses the command line, {_NO_ARGPARSE}" if isinstance(error, SystemExit) else _suggestion(error)
    return f"{place}: {type(error).__name__}{': ' if text else ''}{text}{hint}"


def _suggestion(error: BaseException) -> str:
    """Return a hint with the valid name most similar to the invalid name of the error; empty if there is none."""
    if hint := input_hint(f"{type(error).__name__}: {error}"):
        return hint
    unknown, known = getattr(error, "name", None), list[str]()
    if isinstance(error, AttributeError):
        known = [*(getattr(error.obj, "__all__", None) or dir(error.obj))]
    elif isinstance(error, NameError) and error.__traceback__ is not None:
        frame = traceback.walk_tb(error.__traceback__)
        scope = [*frame][-1][0]
        known = [*scope.f_locals, *scope.f_globals]
    elif isinstance(error, ImportError) and (match := re.match(r"cannot import name '(\w+)'", str(error))):
        unknown, known = match[1], [*getattr(sys.modules.get(str(error.name)), "__all__", ())]
    elif match := re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error)):
        places = (sys.modules[__name__], nn, optim)
        kind = next((getattr(place, match[1]) for place in places if hasattr(place, match[1])), None)
        unknown, known = match[2], [] if kind is None else [*inspect.signature(kind).parameters]
    return suggestion(unknown or "", known)


def _place(path: Path, error: BaseException, source: str = "") -> str:
    """Return the line of the job file or of ``source`` in which the error was raised; empty if raised elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if _is_same(frame.filename, path)]
    if lines:
        return f"{path}, line {lines[-1]}"
    lines = [frame.lineno for frame in frames if frame.filename == source]
    return f"{source}, line {lines[-1]}" if lines else ""


def _deeper_place(path: Path, error: BaseException, source: str) -> str:
    """Return the line of the user's module in which the error was raised; empty if it was in the job file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    if not own or _is_same(own[-1].filename, path) or own[-1].filename == source:
        return ""
    return f", in {os.path.relpath(own[-1].filename)}, line {own[-1].lineno}"


def _is_users(file: str) -> bool:
    """Return whether a file is the user's own module, not one of Python, this package or an installed package."""
    path = Path(file)
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    others = sysconfig.get_path("stdlib"), Path(__file__).parents[1]
    return path.is_file() and not is_installed and not any(path.is_relative_to(folder) for folder in others)


def _is_same(file: str, path: Path) -> bool:
    return Path(file).resolve() == path.resolve()
