"""Checkpoints: HDF5 files that any HDF5 reader can open, and in which every damaged byte is detected.

    /params/<name>              every parameter, and state such as BatchNorm's statistics
    /optimizer/<slot>/<name>    the optimizer's slots
    /averages/<name>            moving averages, if there are any
    /run/config, job, versions  options, the job's arguments and versions, as attributes
    /run/state/<part>           further state, such as the loss scale of float16, as attributes, with a ``version``
    /buffers/<name>             buffers of a PyTorch module that are not averaged; /transient/ if not in its state_dict

The step, the data cursor (``position``), the seed and other single numbers and texts are attributes of the root. A
block of text at the start of the file (``manifest``) contains digests of the whole content, and lists all names,
shapes, dtypes, attributes and byte ranges. Nothing is pickled, and reading a checkpoint executes no code from it.
"""

from __future__ import annotations

from .directory import (
    BEST,
    Retention,
    best,
    find,
    first_intact,
    newest,
    path_for,
    remove_unfinished,
    shard_paths,
    steps,
    verify,
)
from .reader import Checkpoint
from .snapshot import BestCheckpoint, Snapshot
from .state import Fit, Restored, read, read_model, write
from .weights import load_matching, match_of

__all__ = [
    "BEST",
    "BestCheckpoint",
    "Checkpoint",
    "Fit",
    "Restored",
    "Retention",
    "Snapshot",
    "best",
    "find",
    "first_intact",
    "load_matching",
    "match_of",
    "newest",
    "path_for",
    "read",
    "read_model",
    "remove_unfinished",
    "shard_paths",
    "steps",
    "verify",
    "write",
]
