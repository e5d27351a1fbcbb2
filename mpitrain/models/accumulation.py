"""The gradient of a batch, computed for one micro-batch after the other, to save memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, SupportsFloat

from ..core.layout import Array
from ..core.ranges import OnReady, announce_nothing
from ..data.batch import Batch
from .base import Model


class GradientAccumulation:
    """Computes the loss and the gradient of a batch by adding up the losses and gradients of its micro-batches. Local.

    ``forward`` and ``backward`` compute the loss and gradient of a batch. A loop that computes losses by itself calls
    ``begin``, then ``add`` for each micro-batch, and ``backward``.

    Args:
        model: Computes the loss and gradient of a micro-batch.
        grads: The gradient that the model writes.
    """

    def __init__(self, model: Model, grads: Array) -> None:
        self._model, self._grads = model, grads
        self._accumulated: Any = None
        self._remaining = 0  # micro-batches of this step
        self._total: Any = 0.0  # the loss of earlier micro-batches of this step
        self._has_accumulated = False  # whether their gradients are in ``_accumulated``

    def forward(self, batch: Batch, micro_batches: Sequence[int]) -> SupportsFloat:
        """Return the loss of a batch, divided as in ``begin``; see ``Model.compute_loss``."""
        parts, loss = self.begin(batch, micro_batches), None
        if len(parts) == 1:
            return self._model.compute_loss(batch)  # type: ignore[no-any-return]
        for part in parts:
            loss = self.add(self._model.compute_loss(part))
        return loss  # type: ignore[return-value]

    def begin(self, batch: Batch, micro_batches: Sequence[int]) -> list[Batch]:
        """Prepare a step, whose parameters may have changed; return the micro-batches.

        Args:
            micro_batches: Number of examples of each of them.
        """
        self._model.load_params()
        self._model.begin_step(batch)
        if len(micro_batches) == 1:
            parts = [batch]
        else:
            parts = [batch.part(*ends) for ends in pairwise(accumulate(micro_batches, initial=0))]
        self._remaining, self._total, self._has_accumulated = len(parts), 0.0, False
        return parts

    def add(self, loss: Any) -> Any:
        """Add a micro-batch, whose loss the model has just computed.

        Returns:
            The loss of the batch if this was the last micro-batch, whose gradient ``backward`` computes; else None.
        """
        self._remaining -= 1
        if not self._remaining and not self._has_accumulated:  # the only micro-batch
            return loss
        with self._model.activate():
            self._total = self._model.add_loss(self._total, loss)
        if not self._remaining:
            return self._total
        self._model.compute_grads(announce_nothing)
        with self._model.activate():
            self._accumulate()
        self._has_accumulated = True
        return None

    def backward(self, on_ready: OnReady) -> None:
        """Compute the gradient of the last batch. Parts of the gradient may become final one after the other."""
        if not self._has_accumulated:
            self._model.compute_grads(on_ready)
            on_ready(0)
            return
        done = len(self._grads)

        def add_accumulated(start: int) -> None:
            nonlocal done
            if start == done:
                return
            with self._model.activate():
                self._grads[start:done] += self._accumulated[start:done]
            done = start
            on_ready(start)

        self._model.compute_grads(add_accumulated)
        add_accumulated(0)

    def _accumulate(self) -> None:
        if self._accumulated is None:
            self._accumulated = self._grads.copy()
        elif not self._has_accumulated:
            self._accumulated[...] = self._grads
        else:
            self._accumulated += self._grads
