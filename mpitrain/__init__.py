"""Training on many MPI ranks: what a job file imports."""

from . import blas  # isort: skip  # before NumPy is imported
from . import data, nn, optim
from .hooks import Hook
from .job import Job
from .version import __version__

__all__ = ["Hook", "Job", "__version__", "blas", "data", "nn", "optim"]
