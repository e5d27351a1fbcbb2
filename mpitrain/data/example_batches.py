"""Batches of a dataset's examples, which are loaded and transformed one by one.

An error names the example, its file, and the line that failed.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..core.words import one_line
from ..errors import DataError
from .random_numbers import generator_at, seed_all
from .trees import Allocate, Stacked, check_alike, describe, stack


class Examples(Protocol):
    """A map-style dataset, such as a ``torch.utils.data.Dataset``."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return an example."""


class Transform(NamedTuple):
    """A function of one example and, if it is random, of a generator."""

    function: Callable[..., Any]
    is_random: bool


@dataclass(frozen=True)
class ExampleBatches:
    """Makes batches of a dataset.

    Attributes:
        dataset, source, collate: See ``DatasetSplit``.
        transforms: Applied to each example, in this order.
    """

    dataset: Any
    source: str
    transforms: tuple[Transform, ...]
    collate: Callable[[Any], Any]

    def collated(self, examples: Iterable[Any], indices: list[int], allocate: Allocate) -> Any:
        """Return a batch of these examples; see ``DatasetSplit.load``."""
        return (
            self._stacked(examples, indices, allocate) if self.collate is stack else self._collated(examples, indices)
        )

    def _collated(self, examples: Iterable[Any], indices: list[int]) -> Any:
        several = list(examples)
        try:
            return self.collate(several)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DataError(why_not_collated(self.dataset, self.source, indices, several, error)) from error

    def _stacked(self, examples: Iterable[Any], indices: list[int], allocate: Allocate) -> Any:
        """Return the batch that ``stack`` returns, without keeping all examples in memory."""
        first: Any = None
        for place, example in enumerate(examples):
            try:
                if place == 0:
                    first = example
                    batch = Stacked(example, len(indices), allocate)
                check_alike(first, example)
                batch.set(place, example)
            except (TypeError, ValueError) as error:
                pair = [indices[0], indices[place]]
                raise DataError(why_not_collated(self.dataset, self.source, pair, [first, example], error)) from error
        return batch.tree()

    def examples(self, indices: list[int], seed: int, position: int) -> Iterable[Any]:
        """Return the examples; each is loaded when the iterator reaches it, unless the dataset has ``__getitems__``."""
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None:
            return self._one_after_another(None, indices, seed, position)
        seed_all(seed, position)
        with errors_named(self.dataset, self.source, indices):
            examples: list[Any] = list(fetch(indices))
        return self._one_after_another(examples, indices, seed, position) if self.transforms else examples

    def _one_after_another(
        self, examples: list[Any] | None, indices: list[int], seed: int, position: int
    ) -> Iterator[Any]:
        for place, index in enumerate(indices):
            seed_all(seed, position + place)
            with errors_named(self.dataset, self.source, [index]):
                example = self.dataset[index] if examples is None else examples[place]
                if self.transforms:
                    example = self.transformed(example, seed, position + place)
            yield example

    def transformed(self, example: Any, seed: int, position: int) -> Any:
        """Return the example at ``position`` of the stream after the transforms."""
        generator = generator_at(seed, position) if any(transform.is_random for transform in self.transforms) else None
        for function, is_random in self.transforms:
            example = function(example, generator) if is_random else function(example)
        return example


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
