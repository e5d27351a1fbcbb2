"""The interface of models that compute loss and gradient of a batch on flat vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..core.layout import Array
from ..nn.layer import Context


class Model:
    """Computes gradients. Every method is local, except for layers that communicate (see ``Context``).

    Attributes:
        accepts_raw: Whether ``forward`` takes examples as stored, neither converted nor scaled.
        memory: Returns preferred buffers for the next batch, given its size; None if the model has no preference.
    """

    accepts_raw = False
    memory: Callable[[int], tuple[Array, Array]] | None = None

    def bind(self, params: Array, grads: Array) -> None:
        """Compute with ``params`` and write to ``grads``, shape (layout.size,) each, from now on."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Reload the parameters; must be called whenever they have changed."""

    def forward(self, examples: Array, labels: Array, context: Context) -> Any:
        """Return the loss of a batch, weighted by ``context.weight``; shapes as returned by ``Loader.batch``.

        Returns:
            A number; or, on a GPU, an array that will hold it once the device gets there, valid until the next call.
            See ``loss_value``.
        """
        raise NotImplementedError

    def backward(self) -> None:
        """Compute the gradient of the last ``forward``."""
        raise NotImplementedError

    def loss_value(self, loss: Any) -> float:
        """Return the result of ``forward`` as a number; waits for it."""
        return float(loss)

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        """Return the summed loss of examples and the number predicted correctly; see ``Loss.evaluate``."""
        raise NotImplementedError

    def watch(self, on_ready: Callable[[int], None], cuts: Mapping[int, int]) -> None:
        """Call ``on_ready(i)`` during ``backward`` when the model's children from the i-th on have their gradients.

        Optional: all gradients are complete when ``backward`` returns.

        Args:
            cuts: Children for which a call is worthwhile, and the first element of their gradients.
        """

    def scale_loss(self, scale: Array | None) -> None:
        """Multiply the loss's gradient by a number on the device; see ``Loss.scale``."""

    def trace(self) -> None:
        """Make ``forward`` and ``backward`` wait for the device, so that their durations can be measured."""

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
