"""The progress of a run, which a checkpoint records in addition to its vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..core.layout import Array


class Progress(NamedTuple):
    """The point at which training starts or resumes.

    Attributes:
        step: Steps done.
        data_cursor: Examples consumed from the endless stream.
        extra_state: See ``Strategy``. It is the state of the resumed run, whose precision or mode may differ.
    """

    step: int
    data_cursor: int
    extra_state: Mapping[str, float]


# Called with a node's vectors by name on one rank of the node, None on the others, and the rank that knows the initial
# state. Fills the vectors and returns the progress. Collective.
InitialState = Callable[["dict[str, Array] | None", int], Progress]
