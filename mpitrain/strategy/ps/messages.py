"""Requests from workers to servers and their replies: NumPy records, some with a vector (see ``comm.rpc``)."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from ...core.layout import Array
from .coordinator import STATE


class Kind(IntEnum):
    """The kinds of requests."""

    APPLY = 1  # a gradient; replied when it is applied
    READ = 2  # replied with the parameters, once they have at least a version
    VECTOR = 3  # replied with another vector
    NEXT = 4  # replied when there is an assignment
    TURN = 5  # a step has ended; replied when there is an assignment, on request with parameters unless training pauses
    ADMIT = 6
    COLLECT = 7  # a gradient of a step; replied when the step is applied
    STATE = 8  # replied with the statistics of the workers, too
    PAUSE_STEP = 9
    REQUEST_PAUSE = 10
    STOP = 11
    FREEZE = 12  # whether an entry of the layout changes from now on
    RATE = 13  # one of the optimizer's ``live_rates`` from now on


_FIELDS = {
    Kind.APPLY: [("version", "i8"), ("clip", "f8"), ("scaled", "?")],
    Kind.READ: [("version", "i8")],
    Kind.VECTOR: [("index", "i8")],
    Kind.TURN: [("loss", "f8"), ("staleness", "i8"), ("reads", "i8"), ("skipped", "?"), ("brings_params", "?")],
    Kind.ADMIT: [("item", "i8"), ("step", "i8"), ("loss", "f8"), ("reads", "i8")],
    Kind.COLLECT: [("item", "i8"), ("step", "i8"), ("loss", "f8")],
    Kind.PAUSE_STEP: [("step", "i8")],
    Kind.FREEZE: [("entry", "i8"), ("frozen", "?")],
    Kind.RATE: [("index", "i8"), ("rate", "f8")],
}
REQUEST = {kind: np.dtype(_FIELDS.get(kind, [])) for kind in Kind}
REPLY = {
    Kind.APPLY: np.dtype([("staleness", "i8")]),
    Kind.READ: np.dtype([("version", "i8")]),
    Kind.NEXT: np.dtype([("item", "i8"), ("step", "i8"), ("lead", "i8")]),
    Kind.TURN: np.dtype([("done", "i8"), ("item", "i8"), ("step", "i8"), ("lead", "i8"), ("version", "i8")]),
    Kind.ADMIT: np.dtype([("place", "i8")]),
    Kind.STATE: STATE,
}


def request(kind: Kind, *values: float) -> Array:
    """Return a request's message; ``values`` are its fields in order."""
    return np.array(values, REQUEST[kind])


def reply(kind: Kind, *values: float) -> Array:
    """Return the message of the reply to a request."""
    return np.array(values, REPLY[kind])
