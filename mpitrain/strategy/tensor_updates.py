"""Updates by optimizers that need whole tensors: the assignment of tensors to ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import numpy as np

from ..comm.hierarchy import Hierarchy
from ..comm.mpi import MPI
from ..core.extra_state import ExtraState
from ..core.layout import Array, Layout
from ..core.ranges import Range
from ..errors import JobError
from ..monitor.trace import span
from ..optim.whole_tensors import WholeTensorOptimizer

_PART = 1 << 20  # elements


class TensorUpdates:
    """Updates the tensors of a rank; the other ranks update their own tensors.

    Args:
        optimizer: The optimizer.
        layout: The layout of the vectors.
        frozen: Shape (number of the layout's entries,), uint8: 1 for an entry that does not change for now.
        part: The range of the vector whose tensors this rank updates.
        workers: The workers that share the tensors; None if each worker has all tensors, in its own copy.
    """

    def __init__(
        self,
        optimizer: WholeTensorOptimizer,
        layout: Layout,
        frozen: Array,
        part: Range,
        workers: MPI.Intracomm | None = None,
    ) -> None:
        self._optimizer, self._layout, self._frozen, self._workers = optimizer, layout, frozen, workers
        lo, hi = part
        self._own = [
            (index, entry)
            for index, entry in enumerate(layout.entries)
            if entry.kind == "param" and lo <= entry.start < hi
        ]

    def update(self, grads: Array, names: Collection[str] | None = None) -> None:
        """Update this rank's tensors.

        Args:
            grads: Shape (layout.size,): the whole gradient, which may be overwritten.
            names: Names of the tensors to update; None for all.
        """
        if self._optimizer.clip_norm is not None:
            all_grads = grads[: self._layout.n_trained]
            parts = (all_grads[start : start + _PART].astype(np.float64) for start in range(0, len(all_grads), _PART))
            all_grads *= grads.dtype.type(self._optimizer.clip_factor(sum(float(part @ part) for part in parts)))
        views = self._layout.views(grads)
        trained = [entry.name for index, entry in self._own if not self._frozen[index]]
        self._optimizer.update_tensors({name: views[name] for name in trained if names is None or name in names})

    def extra_state(self) -> ExtraState:
        """Return the state of all tensors; empty on other workers than the first if the workers share the tensors.

        Collective over the workers.
        """
        if self._workers is None:
            return self._optimizer.tensor_state()
        of_all = self._workers.gather(self._optimizer.tensor_state())
        return {name: values for state in reversed(of_all or []) for name, values in state.items()}

    def start(self, state: ExtraState) -> None:
        """Begin to train with this state. Local."""
        self._optimizer.begin([entry.name for _, entry in self._own], state)

    def average(self, mean: Callable[[Array], None], workers: MPI.Intracomm, dtype: Any) -> None:
        """Average the state over the workers. Collective over them.

        Args:
            mean: Replaces a vector, shape (layout.size,), by its mean over the workers; collective over them.
            dtype: The type of the vector's elements.

        Raises:
            JobError: The workers have state of different sizes; on all workers.
        """
        views = self._optimizer.arrays_to_average()
        sizes = workers.allgather([view.size for view in views])
        if any(size != sizes[0] for size in sizes):
            raise JobError(
                f"the state of the optimizer {self._optimizer.name} has different sizes on the workers and cannot be "
                "averaged: use --mode sync",
                on_all_ranks=True,
            )
        numbers = np.concatenate(views or [np.zeros(0)]).astype(dtype)
        for start in range(0, len(numbers), self._layout.size):
            part = numbers[start : start + self._layout.size]
            vector = np.zeros(self._layout.size, dtype)
            vector[: len(part)] = part
            mean(vector)
            part[:] = vector[: len(part)]
        for view, values in zip(views, np.split(numbers, np.cumsum(sizes[0])[:-1]) if views else [], strict=True):
            view[:] = values


class DividedTensorUpdates(TensorUpdates):
    """Updates of tensors that all workers divide among them, or the ranks of each node.

    Args:
        params: Shape (layout.size,): the parameters, shared by the ranks of a node.
        is_replicated: Whether every node updates all tensors.
    """

    def __init__(
        self,
        optimizer: WholeTensorOptimizer,
        layout: Layout,
        frozen: Array,
        hierarchy: Hierarchy,
        params: Array,
        is_replicated: bool,
    ) -> None:
        self._hierarchy, self._params, self._is_replicated = hierarchy, params, is_replicated
        n_owners = hierarchy.n_chunks if is_replicated else hierarchy.n_owners
        n_parts = n_owners if optimizer.can_divide() else 1  # otherwise the first owner updates all
        empty = layout.n_trained, layout.n_trained
        self._ranges = [*tensor_ranges(layout, n_parts), *[empty] * (n_owners - n_parts)]
        own = (0, 0)
        if hierarchy.internode is not None:
            own = self._ranges[hierarchy.node.rank if is_replicated else hierarchy.owner()]
        super().__init__(optimizer, layout, frozen, own, hierarchy.comm)

    @span("update")
    def update(self, grads: Array, names: Collection[str] | None = None) -> None:
        super().update(grads, names)
        if not self._is_replicated:
            with span("average"):
                self._hierarchy.allgather_ranges(self._params, self._ranges)


def tensor_ranges(layout: Layout, parts: int) -> list[Range]:
    """Return ranges that cover the parameters, split at tensor boundaries near to equal sizes; some may be empty."""
    starts = np.array([entry.start for entry in layout.entries if entry.kind == "param"] + [layout.n_trained])
    ideal = layout.n_trained * np.arange(parts + 1) / parts
    cuts = [int(starts[np.abs(starts - cut).argmin()]) for cut in ideal]
    return list(pairwise(cuts))
