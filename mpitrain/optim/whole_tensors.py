"""Optimizers whose update of an element depends on the whole tensor that contains it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.extra_state import ExtraState
from ..core.layout import Array
from .optimizer import Optimizer, Slots


@dataclass(frozen=True)
class WholeTensorOptimizer(Optimizer):
    """Base class of optimizers that update whole tensors, with state of any shape, which is not in slots.

    ``strategy.tensor_updates`` divides the tensors among the ranks. Each rank calls ``update_tensors`` with its own
    tensors. ``Updater`` then does the rest, such as moving averages.
    """

    part = 1 << 20

    @property
    def needs_sums(self) -> bool:
        return False

    def check(self) -> None:
        """Do nothing: there is no rule for parts of the vectors."""

    def update(self, params: Array, grads: Array, slots: Slots, rate: float, step: int) -> None:
        """Do nothing: ``update_tensors`` has changed the parameters."""

    @abstractmethod
    def update_tensors(self, grads: Mapping[str, Array]) -> None:
        """Update the model's parameters with these names, and the state of these parameters. Local.

        Args:
            grads: The gradients of some parameters, each of its parameter's shape; gradients of other optimizers'
                parameters are ignored.
        """

    @abstractmethod
    def can_divide(self) -> bool:
        """Return whether the update of a tensor depends on no other tensor. Local; the same on all ranks."""

    @abstractmethod
    def begin(self, names: Sequence[str], state: ExtraState) -> None:
        """Declare which parameters this rank updates, and restore their state. Local.

        Args:
            names: The names of these parameters.
            state: The results of ``tensor_state``, on any ranks; may have state of other parts of the run.
        """

    @abstractmethod
    def tensor_state(self) -> ExtraState:
        """Return the state of the parameters that this rank updates. Local."""

    @abstractmethod
    def arrays_to_average(self) -> list[Array]:
        """Return the state that is averaged with the parameters: views of the state, shape (n,) each. Local."""
