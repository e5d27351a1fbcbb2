"""Training on many MPI ranks: what a job file imports.

Each name is imported when it is first used: the command line answers, and handles signals, before NumPy and Numba
are loaded.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from .core import openblas as blas  # before NumPy is imported
from .version import __version__

if "torch" in sys.modules:  # otherwise ``import torch`` registers the backend, by the entry point
    import mpitrain_torch

    mpitrain_torch.register()

if TYPE_CHECKING:
    from . import data, nn, optim
    from .api.launch import launch, submit
    from .api.run import Run, RunStatus
    from .api.train import train
    from .api.trainer import Trainer
    from .core.activity import progress
    from .errors import RunFailed, UserError
    from .inference.model import TrainedModel, load
    from .plan.hook import Hook
    from .plan.job import Job

_WHERE = {
    "Hook": "plan.hook",
    "Job": "plan.job",
    "Run": "api.run",
    "RunFailed": "errors",
    "RunStatus": "api.run",
    "TrainedModel": "inference.model",
    "Trainer": "api.trainer",
    "UserError": "errors",
    "launch": "api.launch",
    "load": "inference.model",
    "progress": "core.activity",
    "submit": "api.launch",
    "train": "api.train",
}
__all__ = [
    "Hook",
    "Job",
    "Run",
    "RunFailed",
    "RunStatus",
    "TrainedModel",
    "Trainer",
    "UserError",
    "__version__",
    "blas",
    "data",
    "launch",
    "load",
    "nn",
    "optim",
    "progress",
    "submit",
    "train",
]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
