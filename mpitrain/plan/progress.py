"""How far a run has come: what a checkpoint records beside its vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..core.layout import Array


class Progress(NamedTuple):
    """Where training begins.

    Attributes:
        step: Steps done.
        position: Examples taken from the endless stream.
        numbers: See ``Strategy``: of the run that goes on, and so perhaps of another precision, or of another mode.
    """

    step: int
    data_cursor: int
    extra_state: Mapping[str, float]


# Given a node's vectors by name on one rank of the node, None on the others, and the rank that knows where training
# begins: fills the vectors, returns what it found. Collective.
InitialState = Callable[["dict[str, Array] | None", int], Progress]
