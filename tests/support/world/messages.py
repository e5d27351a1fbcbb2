"""The messages between the controller of a world and its ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

STACKS_SIGNAL = signal.SIGRTMIN + 12


@dataclass(frozen=True)
class Task:
    """A call on the first ``n`` ranks.

    Attributes:
        frees: Whether the function must free its MPI objects.
    """

    n: int
    function: Callable[..., Any]
    arguments: Sequence[Any]
    frees: bool


@dataclass(frozen=True)
class Returned:
    """The function's result, and what it left behind in the rank's process, one line each."""

    value: Any
    leaks: Sequence[str]


@dataclass(frozen=True)
class Failed:
    """The function raised an exception."""

    traceback: str
