"""The progress of training: its position, and the next action of a worker."""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """The progress of training.

    Attributes:
        step: Number of completed steps; of all workers together in modes with servers.
        data_cursor: Number of examples taken from the endless stream.
    """

    step: int
    data_cursor: int


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
