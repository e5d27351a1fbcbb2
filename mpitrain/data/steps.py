"""Training without a dataset: a step takes positions of the stream in place of examples."""

from __future__ import annotations

import numpy as np

from ..core.layout import Array
from .batch import Batch, BatchSource, Loading
from .split import Split


class Steps(Split):
    """A split whose examples are only positions, for loops that make their own data.

    Args:
        steps: Number of steps to train.
        step_examples: Positions that a step of all workers takes.

    Attributes:
        steps: As given.
    """

    def __init__(self, steps: int, step_examples: int) -> None:
        super().__init__("steps", steps * step_examples, (), np.float32)
        self.steps = steps

    def read(self, start: int, stop: int, examples: Array, labels: Array) -> None:
        examples[...], labels[...] = 0, 0

    def identity(self) -> str:
        return "steps"

    def own_loader(self, seed: int, loading: Loading = Loading()) -> BatchSource:
        return _Positions(len(self))


class _Positions:
    """See ``BatchSource``."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, position: int, count: int) -> Batch:
        return Batch(np.zeros(count, np.float32), np.zeros(count, np.int64), position)

    def sequential(self, start: int, stop: int, end: int | None = None) -> Batch:
        return self.batch(start, stop - start)

    def close(self) -> None:
        """Do nothing."""
