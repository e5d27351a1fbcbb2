"""The interface of what computes gradients: loss and gradient of a batch on flat vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..core.layout import Array
from ..nn.layer import Context


class Model:
    """What computes gradients. Every method is local, but for layers that communicate (see ``Context``).

    Attributes:
        takes_stored: Whether ``forward`` takes examples as they are stored, neither converted nor scaled.
        memory: Gives the memory that the next batch of so many examples is best put in; None where any will do.
    """

    accepts_raw = False
    memory: Callable[[int], tuple[Array, Array]] | None = None

    def bind(self, params: Array, grads: Array) -> None:
        """Compute with ``params`` and write to ``grads``, shape (layout.size,) each, from now on."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Take notice of the parameters as they are now; to be called whenever they have changed."""

    def forward(self, examples: Array, labels: Array, context: Context) -> Any:
        """The loss of a batch, weighted by ``context.weight``; shapes as ``Loader.batch`` returns them.

        Returns:
            A number; or where the model computes on a device, an array there that will hold it when the device has
            come so far, and until the next call. See ``loss_value``.
        """
        raise NotImplementedError

    def backward(self) -> None:
        """Assign the gradient of what the last ``forward`` returned."""
        raise NotImplementedError

    def loss_value(self, loss: Any) -> float:
        """What ``forward`` has returned, as a number; waits for it."""
        return float(loss)

    def evaluate(self, examples: Array, labels: Array) -> tuple[float, int | None]:
        """The sum of the losses of some examples, and how many are predicted right; see ``Loss.evaluate``."""
        raise NotImplementedError

    def watch(self, told: Callable[[int], None], cuts: Mapping[int, int]) -> None:
        """Have ``told(i)`` called in ``backward`` when the model's children from the i-th on have their gradients.

        A replica may leave that out: all gradients are there when ``backward`` returns.

        Args:
            cuts: Children for which that is worth an interruption, and where the gradients of each begin.
        """

    def scale_loss(self, scale: Array | None) -> None:
        """Have the loss's gradient multiplied by a number on the device; see ``Loss.scale``."""

    def trace(self) -> None:
        """Have ``forward`` and ``backward`` return when they are done, so that their times are those of the work."""

    def memory_use(self) -> dict[str, int]:
        """Bytes of a device's memory by what they are for, beside the parameters and what is like them; under ``held``
        all that this process has taken there. Empty where there is no such memory."""
        return {}

    def activate(self) -> AbstractContextManager[object]:
        """A block in which the vectors that this is bound to may be computed with."""
        return nullcontext()

    def to_host(self, vector: Array) -> Array:
        """A vector that this is bound to, in this process's memory: itself or a copy."""
        return vector

    def close(self) -> None:
        """End what runs beside the caller, and give memory back."""
