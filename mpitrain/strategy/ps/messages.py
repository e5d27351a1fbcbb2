"""The operations that servers perform for workers on other nodes: NumPy records, some with a vector (see ``comm.rpc``).

``OPERATIONS`` is the only list of operations. Proxies (``remote``) use it to encode requests, and the server uses it to
dispatch requests.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from ...comm.rpc import unpack
from ...core.layout import Array
from .coordinator import STATE


class Kind(IntEnum):
    """The kinds of requests."""

    APPLY = 1  # a gradient; the reply comes when it is applied
    READ = 2  # request for parameters of at least the given version
    VECTOR = 3  # request for another vector
    NEXT = 4  # request for a work item; the reply comes when one is assigned
    # A step has ended. The reply comes when a work item is assigned; on request it contains parameters, unless training
    # pauses or ends.
    FINISH = 5
    ADMIT = 6  # whether a gradient has a place in its step
    COLLECT = 7  # a gradient of a step; the reply comes when the step is applied
    STATE = 8  # the reply also contains the statistics of the workers
    PAUSE_STEP = 9
    REQUEST_PAUSE = 10
    STOP = 11
    FREEZE = 12  # whether an entry of the layout is frozen from now on
    RATE = 13  # new value of one of the optimizer's ``live_rates``


class Operation(NamedTuple):
    """The messages of a kind of request.

    Attributes:
        request: The type of the request's record.
        reply: The type of the reply's record.
        method: The method of the step coordinator that the server calls with the request's fields; it returns the reply
            if that has a field. Empty if the server has a method for this kind.
    """

    request: np.dtype[Any]
    reply: np.dtype[Any]
    method: str = ""


_NOTHING: np.dtype[Any] = np.dtype([])
_INT, _FLOAT, _BOOL = np.dtype("i8"), np.dtype("f8"), np.dtype("?")


def _record(**fields: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(list(fields.items()))


_COUNTED = _record(worker=_INT, loss=_FLOAT, staleness=_INT, reads=_INT, skipped=_BOOL, brings_params=_BOOL)
_ASSIGNED = _record(done=_INT, item=_INT, step=_INT, lead=_INT, version=_INT)
OPERATIONS = {
    Kind.APPLY: Operation(_record(version=_INT, clip=_FLOAT, scaled=_BOOL), _record(staleness=_INT)),
    Kind.READ: Operation(_record(version=_INT), _record(version=_INT)),
    Kind.VECTOR: Operation(_record(index=_INT), _NOTHING),
    Kind.NEXT: Operation(_record(worker=_INT), _ASSIGNED),
    Kind.FINISH: Operation(_COUNTED, _ASSIGNED),
    Kind.ADMIT: Operation(
        _record(worker=_INT, item=_INT, step=_INT, loss=_FLOAT, reads=_INT), _record(place=_INT), "admit"
    ),
    Kind.COLLECT: Operation(_record(item=_INT, step=_INT, loss=_FLOAT), _NOTHING),
    Kind.STATE: Operation(_NOTHING, STATE),
    Kind.PAUSE_STEP: Operation(_record(step=_INT), _NOTHING, "set_pause_step"),
    Kind.REQUEST_PAUSE: Operation(_NOTHING, _NOTHING, "request_pause"),
    Kind.STOP: Operation(_NOTHING, _NOTHING, "stop"),
    Kind.FREEZE: Operation(_record(entry=_INT, frozen=_BOOL), _NOTHING),
    Kind.RATE: Operation(_record(index=_INT, rate=_FLOAT), _NOTHING),
}


def encode(record: np.dtype[Any], *values: float) -> Array:
    """Return the message with these fields, in order."""
    return np.array(values, record)


def decode(record: np.dtype[Any], message: Array) -> tuple[Any, ...]:
    """Return the fields of a message."""
    return unpack(message, record).item()  # type: ignore[no-any-return]
