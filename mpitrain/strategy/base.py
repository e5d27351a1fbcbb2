"""What every mode offers the training loop: parameters to read, a gradient to fill, and an end to each step."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..params import Array

STOP = 1  # flag: some rank was asked to stop


class StepResult(NamedTuple):
    """What all workers know at the end of a step.

    Attributes:
        loss: Mean loss over the global batch.
        flags: Union of the flags that the ranks raised.
        updated: False where the update was skipped.
    """

    loss: float
    flags: int
    updated: bool


class Strategy(Protocol):
    """Turns this rank's gradient for a step into the parameters for the next.

    Attributes:
        params: Shape (layout.size,): what the model computes with. Not to be written.
        grads: Shape (layout.size,): where the model's backward pass writes.
        average: Moving averages of the parameters, shape (layout.size,), or None.
        vectors: ``params``, the optimizer's slots and ``average`` by name: what a checkpoint holds. Before
            training the ranks with ``leads`` fill them, all with the same values.
        leads: Whether this rank fills the vectors.
    """

    params: Array
    grads: Array
    average: Array | None
    vectors: dict[str, Array]
    leads: bool

    def begin(self, step: int, loss: float, flags: int) -> None:
        """Announce this rank's share of the step's loss, before its backward pass; local."""

    def ready(self, start: int) -> None:
        """Say that ``grads[start:]`` is complete; called with falling ``start``, at last with 0; local."""

    def finish(self) -> StepResult:
        """Agree on the new parameters; collective over the workers."""

    def complete(self, name: str) -> Array:
        """One of ``vectors``, made whole on every node; collective over the workers."""

    def free(self) -> None:
        """Give memory back; collective over the workers."""
