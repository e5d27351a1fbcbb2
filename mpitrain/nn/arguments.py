"""Checks of the arguments that job files pass to layers, and their error messages."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from ..core.layout import Shape
from ..errors import JobError


def positive(layer: object, name: str, value: Any) -> int:
    """Return ``value`` as an int >= 1.

    Raises:
        JobError: ``value`` is not an integer >= 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise JobError(f"{_name(layer)}: {name} is {value!r}, must be an integer >= 1")
    return int(value)


def within(layer: object, name: str, value: Any, low: float, high: float) -> float:
    """Return ``value`` as a float in [low, high).

    Raises:
        JobError: ``value`` is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) < high:
        raise JobError(f"{_name(layer)}: {name} is {value!r}, must be a number in [{low}, {high})")
    return float(value)


def wrong_shape(layer: object, expected: Iterable[object], given: Shape, hint: str = "") -> JobError:
    """Return the error for examples of a wrong shape; a name in ``expected`` stands for any length."""
    lengths = [str(length) for length in expected]
    wanted = f"({lengths[0]},)" if len(lengths) == 1 else f"({', '.join(lengths)})"
    message = f"{_name(layer)} requires examples of shape {wanted}, got {given}"
    return JobError(f"{message}; {hint}" if hint else message)


def _name(layer: object) -> str:
    return type(layer).__name__
