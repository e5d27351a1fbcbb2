"""The interface of models: flat parameters in, loss and flat gradient of a batch out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsFloat

from ..core.extra_state import ExtraState
from ..core.layout import Array
from ..core.ranges import OnReady, announce_nothing, split_batch
from ..data.batch import Batch


class Model:
    """Computes losses and gradients. Every method is local, except for layers that communicate (see ``nn.Context``).

    A subclass implements ``bind``, ``evaluate``, and ``compute_loss`` and ``compute_grads`` for one micro-batch.
    ``forward`` and ``backward`` accumulate gradients over the micro-batches of a batch.

    Args:
        micro_batches: Number of parts of a batch whose gradients are computed one after the other, to save memory.

    Attributes:
        accepts_raw: Whether batches hold examples as stored, neither converted nor scaled.
    """

    accepts_raw = False

    def __init__(self, micro_batches: int = 1) -> None:
        self._micro_batches = micro_batches
        self._accumulated: Any = None

    def bind(self, params: Array, grads: Array) -> None:
        """Compute with ``params`` and write to ``grads``, shape (layout.size,) each, from now on."""
        self.grads = grads

    def forward(self, batch: Batch) -> SupportsFloat:
        """Return this worker's share of the step's loss: the examples' losses, times ``plan.weight``, summed.

        Returns:
            A number; or, if the parameters are on a GPU, an array on it, valid until the next call. The conversion to
            ``float`` waits for the device.
        """
        self.load_params()
        if self._micro_batches == 1:
            return self.compute_loss(batch)  # type: ignore[no-any-return]
        *first, last = split_batch(batch.count, self._micro_batches)
        total: Any = 0.0
        for index, (start, stop) in enumerate(first):
            loss = self.compute_loss(batch.part(start, stop))
            total = self.accumulate(total, loss, first=index == 0)
        loss = self.compute_loss(batch.part(*last))
        with self.activate():
            return self.add_loss(total, loss)  # type: ignore[no-any-return]

    def backward(self, on_ready: OnReady) -> None:
        """Compute the gradient of the last ``forward``; its parts may become final one after the other."""
        if self._micro_batches == 1:
            self.compute_grads(on_ready)
            on_ready(0)
            return
        done = len(self.grads)

        def add_accumulated(start: int) -> None:
            nonlocal done
            if start == done:
                return
            with self.activate():
                self.grads[start:done] += self._accumulated[start:done]
            done = start
            on_ready(start)

        self.compute_grads(add_accumulated)
        add_accumulated(0)

    def evaluate(self, batch: Batch) -> tuple[float, int | None]:
        """Return the summed loss of a batch and the number of correct predictions; see ``nn.Loss.evaluate``."""
        raise NotImplementedError

    def predict(self, batch: Batch) -> Array:
        """Return the outputs for a batch, in host memory; the labels are not used."""
        raise NotImplementedError

    @property
    def extra_state(self) -> ExtraState:
        """State that a checkpoint stores in addition to the vectors, by name."""
        return {}

    def load_extra_state(self, state: ExtraState) -> None:
        """Restore ``extra_state``; ``state`` may have other names, too, or none."""

    def accumulate(self, total: Any, loss: Any, first: bool) -> Any:
        """Compute the gradient of a micro-batch that is not the last one; return the sum of the losses.

        Args:
            total: The sum of the losses of earlier micro-batches.
            loss: As ``compute_loss`` has returned it.
            first: Whether it is the first one.
        """
        self.compute_grads(announce_nothing)
        with self.activate():
            self._accumulate(first)
            return self.add_loss(total, loss)

    # For subclasses.

    def load_params(self) -> None:
        """Copy the bound parameters to where the model computes; called when they have changed."""

    def compute_loss(self, batch: Batch) -> Any:
        """Return the loss of a micro-batch; see ``forward``."""
        raise NotImplementedError

    def compute_grads(self, on_ready: OnReady) -> None:
        """Write the gradient of the last ``compute_loss``; may call ``on_ready`` with values above 0."""
        raise NotImplementedError

    def add_loss(self, total: Any, loss: Any) -> Any:
        """Return the sum of losses of micro-batches."""
        return total + float(loss)

    def _accumulate(self, first: bool) -> None:
        if self._accumulated is None:
            self._accumulated = self.grads.copy()
        elif first:
            self._accumulated[...] = self.grads
        else:
            self._accumulated += self.grads

    # Devices.

    def memory(self, count: int) -> tuple[Array, Array] | None:
        """Return preferred memory for the next batch of ``count`` examples, and for its labels; None for any."""
        return None

    def hold(self, examples: Array, labels: Array) -> bool:
        """Copy the training data to the device if its memory has room. Local; call between two steps, once.

        Args:
            examples, labels: The stored arrays, shape (n, ...).

        Returns:
            Whether the data was copied; every later ``forward`` must then be given an ``IndexBatch``.
        """
        return False

    def memory_use(self) -> dict[str, int]:
        """Return bytes of device memory by purpose, without parameters and vectors of the same size.

        ``held`` is all device memory that this process has allocated. Empty if the model uses no device memory.
        """
        return {}

    def activate(self) -> AbstractContextManager[object]:
        """Return a context in which the bound vectors may be used in computations."""
        return nullcontext()

    def to_host(self, vector: Array) -> Array:
        """Return a bound vector in host memory, itself or a copy."""
        return vector

    def close(self) -> None:
        """Stop background work and free memory."""
