"""Batches of a dataset's examples, which are loaded and transformed one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..errors import DataError
from .example_errors import errors_named, why_not_collated
from .random_numbers import generator_at, seed_all
from .trees import Allocate, Stacked, check_alike, stack


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
