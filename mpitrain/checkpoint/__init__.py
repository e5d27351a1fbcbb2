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

from ..core.checkpoint_files import (
    path_for as path_for,
    remove_unfinished as remove_unfinished,
    shard_paths as shard_paths,
    steps as steps,
)
from .directory import (
    BEST as BEST,
    Retention as Retention,
    best as best,
    find as find,
    first_intact as first_intact,
    newest as newest,
    verify as verify,
)
from .reader import Checkpoint as Checkpoint
from .snapshot import BestCheckpoint as BestCheckpoint, Snapshot as Snapshot
from .state import Fit as Fit, Restored as Restored, read as read, read_model as read_model, write as write
from .weights import load_matching as load_matching, match_of as match_of
