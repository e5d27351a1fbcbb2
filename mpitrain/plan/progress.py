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
    """A batch for which a worker computes a gradient.

    Attributes:
        step: The 0-based step that the gradient is for.
        position: Index of the batch's first example in the endless stream of examples.
    """

    step: int
    position: int


class ConsistentPoint(NamedTuple):
    """A pause in which no worker computes and the trained model is complete. The same on all workers.

    Attributes:
        step: Number of completed steps.
        data_cursor: Number of examples taken from the endless stream.
        reasons: Why the chief has requested the point (``TrainingLoop.request_pause``); empty for a regular point.
        last: Whether training ends here.
    """

    step: int
    data_cursor: int
    reasons: frozenset[str]
    last: bool
