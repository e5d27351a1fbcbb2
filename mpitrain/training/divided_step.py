"""A step in which a script uses gradients, or that has several backward passes or several updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.layout import Array, Layout
from ..models.base import DividedModel
from ..strategy.base import Part, UpdatesOnRequest
from .loop import BACKWARD


@dataclass
class _PartGradient:
    """The gradient of the parameters that one optimizer updates.

    Attributes:
        names: The names of these parameters; None for all parameters of the model.
        views: The gradients of these parameters, as views of ``strategy.grads``.
        is_averaged: Whether the gradient is averaged over all workers.
        is_applied: Whether an update has applied the gradient, so that the next backward pass sets it to zero.
    """

    names: Collection[str] | None
    views: list[Array]
    is_averaged: bool = False
    is_applied: bool = True


class DividedStep:
    """The gradients of a step: added by ``backward``, averaged once the script uses them, applied by ``update``.

    Gradients stay until they are applied, perhaps in a later step.

    Args:
        strategy: Averages the gradients and updates the parameters.
        model: Computes the gradients, in ``strategy.grads``.
        layout: The layout of ``strategy.grads``.
        workers: The number of workers whose gradients are summed.
        names: The names of the parameters that each optimizer updates; None for all.

    Attributes:
        n_backward: Number of backward passes of this step.
    """

    def __init__(
        self,
        strategy: UpdatesOnRequest,
        model: DividedModel,
        layout: Layout,
        workers: int,
        names: Sequence[Collection[str] | None],
    ) -> None:
        self._strategy, self._model, self._workers = strategy, model, workers
        views = layout.views(strategy.grads)
        params = [entry.name for entry in layout.entries if entry.kind == "param"]
        self._state = [views[entry.name] for entry in layout.entries if entry.kind == "state"]
        self._parts = [_PartGradient(own, [views[name] for name in (params if own is None else own)]) for own in names]
        self._begin()

    def _begin(self) -> None:
        self.n_backward, self._has_updated = 0, False
        self._loss: Any = 0.0

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that no update has applied."""
        return any(not part.is_applied for part in self._parts)

    def can_update(self, optimizers: Sequence[int]) -> bool:
        """Whether this step has had a backward pass, and one of the given optimizers has a gradient to apply."""
        return bool(self.n_backward) and any(not self._parts[index].is_applied for index in optimizers)

    @property
    def is_averaged(self) -> bool:
        """Whether no gradient is left to average."""
        return all(part.is_applied or part.is_averaged for part in self._parts)

    def backward(self, loss: Any, optimizers: Sequence[int]) -> None:
        """Add the gradient of the model's last loss. Local.

        Args:
            loss: This worker's share of the loss, as the model returns it.
            optimizers: The indices of the optimizers whose parameters get the gradient.
        """
        parts, model = [self._parts[index] for index in optimizers], self._model
        model.collect_replaced_grads()
        again = [part for part in parts if part.is_averaged and not part.is_applied]
        # The averages will be summed over the workers once more.
        averages = [[view / self._workers for view in part.views] for part in again]
        for part in parts:
            if part.is_applied or part in again:
                model.clear_grads(part.names)
            part.is_averaged = part.is_applied = False
        with BACKWARD:
            model.add_grads(_union(parts))
        for part, earlier in zip(again, averages, strict=True):
            for view, average in zip(part.views, earlier, strict=True):
                view += average
        self.n_backward += 1
        self._loss = self._loss + loss

    def average(self) -> None:
        """Average the gradients that are neither averaged nor applied. Collective as ``UpdatesOnRequest.average``."""
        self._model.write_state()
        others = [part for part in self._parts if part.is_applied or part.is_averaged]
        kept = [(view, view.copy()) for part in others for view in part.views]
        self._strategy.begin(self._loss)
        with np.errstate(all="ignore"):
            self._strategy.average()
        for view, values in kept:
            view[...] = values
        self._model.show_grads()
        for part in self._parts:
            part.is_averaged = True

    def update(self, optimizers: Sequence[int]) -> None:
        """Update with those ``optimizers`` that have a gradient. Collective as ``UpdatesOnRequest.update``."""
        if not self.is_averaged:
            self.average()
        indices = [index for index in optimizers if not self._parts[index].is_applied]
        parts = [self._parts[index] for index in indices]
        names = _union(parts)
        with np.errstate(all="ignore"):
            self._strategy.update(None if names is None else Part(sum(1 << index for index in indices), names))
        if names is not None:  # otherwise the step ends
            self._model.mark_updated(names)
        self._has_updated = True
        for view in self._state:  # the changes of the state have been applied, too
            view[...] = 0
        for part in parts:
            part.is_applied = True

    def change_params(self, change: Callable[[], object]) -> None:
        """Call a function that applies the gradients; see ``UpdatesOnRequest.change_params``."""
        if self.n_backward and not self.is_averaged:
            self.average()

        def change_and_store() -> None:
            change()
            self._model.store_params()

        self._strategy.change_params(change_and_store)
        self._model.mark_updated(None)
        for part in self._parts:
            part.is_applied = True

    def end(self) -> None:
        """End the step. Collective as ``UpdatesOnRequest.end_step``."""
        self._strategy.begin(self._loss)
        with np.errstate(all="ignore"):
            self._strategy.end_step(self._has_updated, complete=not self.has_gradient)
        self._begin()

    def take_over(self) -> Any:
        """Return the loss of this step, whose gradient ``Strategy.finish`` applies. Local."""
        loss = self._loss
        for part in self._parts:
            part.is_applied = True
        self._begin()
        return loss


def _union(parts: Sequence[_PartGradient]) -> Collection[str] | None:
    """Return the names of the parameters of these parts; None for all parameters of the model."""
    if any(part.names is None for part in parts):
        return None
    return [name for part in parts for name in part.names or ()]
