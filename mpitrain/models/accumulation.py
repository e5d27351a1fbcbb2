"""The gradient of a step, computed for one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..core.layout import Array
from ..core.ranges import OnReady, announce_nothing
from ..data.batch import Batch
from .base import Model


class GradientAccumulation:
    """Computes the loss and the gradient of a step by adding up the losses and gradients of its micro-batches. Local.

    A step consists of ``forward`` for each batch, and ``backward``. A loop that computes losses by itself calls
    ``begin``, then ``add`` for each micro-batch, and ``backward``.

    Args:
        model: Computes the loss and gradient of a micro-batch.
        sums: Memory for each sum, shape (layout.size,) each. The model writes its gradients to the last one.
        additions: See ``plan.progress.Share``.
        rounds_losses: Whether losses are rounded to float32. Their sum in float64 is then exact, and does not depend on
            the order, if none is more than 2**20 times as large as another.
        sums_losses: Whether ``sums`` have one more element, in which the losses are added up in the order of gradients.
    """

    def __init__(
        self,
        model: Model,
        sums: Sequence[Array],
        additions: Sequence[Sequence[int]] = ((0,),),
        rounds_losses: bool = False,
        sums_losses: bool = False,
    ) -> None:
        self._model, self._rounds_losses, self._sums_losses = model, rounds_losses, sums_losses
        *other_sums, self._grads = sums
        self._additions = [count for of_sum in additions for count in of_sum]
        ends = accumulate(map(len, additions))
        self._sum_after = dict(zip((end - 1 for end in ends), other_sums, strict=False))
        self._done = len(self._additions)  # micro-batches of this step
        self._total: Any = 0.0  # their loss
        self._partial: list[Array] = []  # sums of their gradients
        self._unused: list[Array] = []  # memory for such sums

    @property
    def has_begun(self) -> bool:
        """Whether some micro-batches of this step have been added, and others follow."""
        return 0 < self._done < len(self._additions)

    def forward(self, batch: Batch, micro_batches: Sequence[int], begins_step: bool = True) -> Any:
        """Add a batch, divided as in ``parts``.

        Args:
            begins_step: Whether it is the first batch of a step, which may have several gradients.

        Returns:
            The loss of the gradient if this was its last batch; else None.
        """
        if self._done == len(self._additions):
            self.begin(batch, begins_step)
        loss = None
        for part in self.parts(batch, micro_batches):
            loss = self.add(self._model.compute_loss(part))
        return loss

    def begin(self, batch: Batch, begins_step: bool = True) -> None:
        """Prepare a gradient, for which the parameters may have changed; ``batch`` is its first one."""
        self._model.load_params()
        if begins_step:
            self._model.begin_step(batch)
        self._done, self._total = 0, 0.0
        self._unused += self._partial
        self._partial = []

    def parts(self, batch: Batch, micro_batches: Sequence[int]) -> list[Batch]:
        """Return the micro-batches of a batch, which have the given numbers of examples."""
        if len(micro_batches) == 1:
            return [batch]
        return [batch.part(*ends) for ends in pairwise(accumulate(micro_batches, initial=0))]

    def add(self, loss: Any) -> Any:
        """Add a micro-batch, whose loss the model has just computed.

        Returns:
            The loss of the step if this was its last micro-batch, whose gradient ``backward`` computes; else None.
        """
        if self._rounds_losses:
            loss = float(np.float32(float(loss)))
        if self._sums_losses:
            with self._model.activate():
                self._grads[-1:] = loss
        index, self._done = self._done, self._done + 1
        if len(self._additions) == 1:
            return loss
        with self._model.activate():
            self._total = self._model.add_loss(self._total, loss)
        if self._done == len(self._additions):
            return self._total
        self._model.compute_grads(announce_nothing)
        with self._model.activate():
            self._keep(index)
        return None

    def backward(self, on_ready: OnReady) -> None:
        """Compute the gradient of the last micro-batch. Parts of the sum may become final one after the other."""
        count = self._additions[-1]
        if not count:
            self._model.compute_grads(on_ready)
            on_ready(0)
            return
        done = len(self._grads)

        def add_partial(start: int) -> None:
            nonlocal done
            if start == done:
                return
            with self._model.activate():
                for partial in reversed(self._partial[-count:]):
                    self._grads[start:done] += partial[start:done]
            done = start
            on_ready(start)

        self._model.compute_grads(add_partial)
        add_partial(0)

    def _keep(self, index: int) -> None:
        """Make the additions after a micro-batch, and keep the result."""
        total, count = self._grads, self._additions[index]
        for _ in range(count):
            partial = self._partial.pop()
            partial += total
            if total is not self._grads:
                self._unused.append(total)
            total = partial
        kept = self._sum_after.get(index)
        if kept is None and total is self._grads:
            kept = self._unused.pop() if self._unused else self._grads.copy()
        if kept is not None:
            kept[...] = total
        if index not in self._sum_after:
            self._partial.append(total if kept is None else kept)
        elif total is not self._grads:
            self._unused.append(total)
