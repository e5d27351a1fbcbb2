"""The progress of training: how far it has come, and what a worker does next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..core.layout import Array

# State that a checkpoint stores in addition to the vectors: numbers, strings, and arrays, whose names begin with a
# group in ``core.layout.ARRAY_GROUPS``.
ExtraState = Mapping[str, "float | str | Array"]


class Progress(NamedTuple):
    """How far training has come.

    Attributes:
        step: Number of completed steps; of all workers together in the served modes.
        data_cursor: Number of examples taken from the endless stream.
        extra_state: On a resume, the state of the resumed run, whose precision or mode may differ.
    """

    step: int
    data_cursor: int
    extra_state: ExtraState = MappingProxyType({})


class WorkItem(NamedTuple):
    """A batch to compute a gradient of.

    Attributes:
        step: The 0-based step that the gradient is for.
        position: Index of its first example in the endless stream of examples.
    """

    step: int
    position: int


class ConsistentPoint(NamedTuple):
    """All workers hold the same complete parameters, and none computes. The same on all workers.

    Attributes:
        step: Number of completed steps.
        data_cursor: Number of examples taken from the endless stream.
        reasons: Why the chief has requested it (``TrainingLoop.request_pause``); empty if it comes regularly.
        last: Whether training ends here.
    """

    step: int
    data_cursor: int
    reasons: frozenset[str]
    last: bool


# Called with a node's vectors by name on one rank of the node, None on the others, and the rank that has the initial
# state. Fills the vectors and returns the progress. Collective.
InitialState = Callable[["dict[str, Array] | None", int], Progress]
