"""Checks of what a job file passes to a layer, and the one wording of their errors."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from ..core.layout import Shape
from ..errors import JobError


def positive(layer: object, name: str, value: Any) -> int:
    """``value`` as an int of at least 1.

    Raises:
        JobError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise JobError(f"{_name(layer)}: {name} is {value!r}; give an integer of at least 1")
    return int(value)


def within(layer: object, name: str, value: Any, low: float, high: float) -> float:
    """``value`` as a float in [low, high).

    Raises:
        JobError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) < high:
        raise JobError(f"{_name(layer)}: {name} is {value!r}; give a number in [{low}, {high})")
    return float(value)


def wrong_shape(layer: object, expected: Iterable[object], given: Shape, hint: str = "") -> JobError:
    """The error for examples that ``layer`` cannot take; a name in ``expected`` stands for any length."""
    lengths = [str(length) for length in expected]
    wanted = f"({lengths[0]},)" if len(lengths) == 1 else f"({', '.join(lengths)})"
    message = f"{_name(layer)} takes examples of shape {wanted}, not {given}"
    return JobError(f"{message}; {hint}" if hint else message)


def _name(layer: object) -> str:
    return type(layer).__name__
