"""Checkpoints: HDF5 files that any reader of HDF5 understands, and of which no damaged byte goes unnoticed.

    /params/<name>              every parameter, and state such as BatchNorm's statistics
    /optimizer/<slot>/<name>    the optimizer's slots
    /averages/<name>            moving averages, where there are any
    /run/config, job, versions  options, the job's arguments and versions, as attributes
    /run/state                  numbers of the run's state, as attributes: with float16 the loss's scale

The step, the data cursor (``position``), the seed, and what else is a number or a text are attributes of the
root. A block of text in front of the file (``manifest``) has a digest of each dataset's values and one of everything else.
Nothing is pickled, and nothing is executed when a checkpoint is read.
"""

from __future__ import annotations

from .directory import Retention, first_intact, newest, part_paths, path_for, remove_unfinished, steps, verify
from .reader import Checkpoint
from .state import Fit, load_matching, match_of, read, write

__all__ = [
    "Checkpoint",
    "Fit",
    "Retention",
    "first_intact",
    "load_matching",
    "match_of",
    "newest",
    "part_paths",
    "path_for",
    "read",
    "remove_unfinished",
    "steps",
    "verify",
    "write",
]
