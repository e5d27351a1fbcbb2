"""Updates by optimizers that need whole tensors: which rank updates which of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from ..comm.mpi import MPI
from ..core.extra_state import ExtraState
from ..core.layout import Array, Layout
from ..errors import JobError
from ..optim.whole_tensors import WholeTensorOptimizer

Range = tuple[int, int]


class TensorUpdates:
    """Updates the tensors of a rank; the others' are updated by their ranks.

    Args:
        optimizer: The optimizer.
        layout: The layout of the vectors.
        frozen: Shape (number of the layout's entries,), uint8: 1 for an entry that does not change for now.
        part: The range of the vector whose tensors are this rank's, one of ``tensor_ranges``.
    """

    def __init__(self, optimizer: WholeTensorOptimizer, layout: Layout, frozen: Array, part: Range) -> None:
        self._optimizer, self._layout, self._frozen = optimizer, layout, frozen
        lo, hi = part
        self._own = [
            (index, entry)
            for index, entry in enumerate(layout.entries)
            if entry.kind == "param" and lo <= entry.start < hi
        ]

    def update(self, grads: Array) -> None:
        """Update this rank's tensors.

        Args:
            grads: Shape (layout.size,): the whole gradient, which may be overwritten.
        """
        clip = 1.0
        if self._optimizer.clip_norm is not None:
            norm = np.linalg.norm(grads[: self._layout.n_trained].astype(np.float64))
            clip = self._optimizer.clip_factor(norm**2)
        own = {}
        for index, entry in self._own:
            if not self._frozen[index]:
                gradient = grads[entry.start : entry.stop]
                if clip != 1.0:
                    gradient *= clip
                own[entry.name] = gradient.reshape(entry.shape)
        self._optimizer.update_tensors(own)

    def extra_state(self, workers: MPI.Intracomm) -> ExtraState:
        """Return the state of all tensors, on the first worker; empty on the others. Collective over the workers."""
        of_all = workers.gather(self._optimizer.tensor_state())
        return {name: values for state in reversed(of_all or []) for name, values in state.items()}

    def start(self, state: ExtraState) -> None:
        """Begin to train with this state. Local."""
        self._optimizer.begin([entry.name for _, entry in self._own], state)

    def average(self, mean: Callable[[Array], None], workers: MPI.Intracomm, dtype: Any) -> None:
        """Average the state over the workers. Collective over them.

        Args:
            mean: Replaces a vector, shape (layout.size,), by its mean over the workers; collective over them.
            dtype: Of such a vector.

        Raises:
            JobError: The workers have state of different sizes; on all workers.
        """
        views = self._optimizer.numbers_to_average()
        sizes = workers.allgather([view.size for view in views])
        if any(size != sizes[0] for size in sizes):
            error = JobError(
                f"the workers have different state of the optimizer {self._optimizer.name}, which cannot be averaged: "
                "use --mode sync"
            )
            error.on_all_ranks = True
            raise error
        numbers = np.concatenate(views or [np.zeros(0)]).astype(dtype)
        for start in range(0, len(numbers), self._layout.size):
            part = numbers[start : start + self._layout.size]
            vector = np.zeros(self._layout.size, dtype)
            vector[: len(part)] = part
            mean(vector)
            part[:] = vector[: len(part)]
        for view, values in zip(views, np.split(numbers, np.cumsum(sizes[0])[:-1]) if views else [], strict=True):
            view[:] = values


def tensor_ranges(layout: Layout, parts: int) -> list[Range]:
    """Return ranges of nearly equal size that cover the parameters, split between tensors; some may be empty."""
    starts = np.array([entry.start for entry in layout.entries if entry.kind == "param"] + [layout.n_trained])
    ideal = layout.n_trained * np.arange(parts + 1) / parts
    cuts = [int(starts[np.abs(starts - cut).argmin()]) for cut in ideal]
    return list(pairwise(cuts))
