"""Errors of examples that are loaded one by one. An error names the example, its file, and the line that failed."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.words import one_line
from ..errors import DataError
from .trees import describe


def name_of(dataset: Any, index: int) -> str:
    """Return the index of an example, and its file if the dataset provides it."""
    named, samples = getattr(dataset, "name_of", None), getattr(dataset, "samples", None)
    if named is not None:
        return f"example {index} ({named(index)})"
    if isinstance(samples, list) and isinstance(samples[index], tuple):  # of torchvision's ImageFolder
        return f"example {index} ({samples[index][0]})"
    return f"example {index}"


@contextlib.contextmanager
def errors_named(dataset: Any, source: str, indices: Sequence[int]) -> Iterator[None]:
    """Convert an exception to a ``DataError``, also ``SystemExit``, which would end a process without a message.

    Args:
        source: Origin of the data.
        indices: Indices of the examples that are loaded; empty if the examples have no indices.
    """
    try:
        yield
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        name = f"one of the examples {', '.join(map(str, indices[:4]))} ..." if indices else "an example"
        if len(indices) == 1:
            name = name_of(dataset, indices[0])
        raise DataError(
            f"{name} of {source} cannot be loaded: {type(error).__name__}: {one_line(error)} "
            f"({frame.filename}, line {frame.lineno})"
        ) from error


def why_not_collated(dataset: Any, source: str, indices: Sequence[int], examples: list[Any], error: Exception) -> str:
    """Return the reason why examples cannot be collated; it names two examples that differ, if there are any."""
    kinds = [describe(example) for example in examples]
    other = next((place for place, kind in enumerate(kinds) if kind != kinds[0]), None)
    why = f"{name_of(dataset, indices[0])} is {kinds[0]}: {one_line(error)}"
    if other is not None:
        first, second = (name_of(dataset, indices[place]) for place in (0, other))
        why = f"{first} is {kinds[0]}, but {second} is {kinds[other]}; make them equal, or pass a collate function"
    return f"examples of {source} cannot be collated: {why}"
