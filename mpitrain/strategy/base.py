"""The interface between the training loop and every mode: work items, parameters, gradients, and the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..core.layout import Array
from ..errors import NonFiniteLoss
from ..monitor.worker_stats import WorkerStats

# Called with an object, a method name and a kind of span: records every call of the method. See ``monitor.trace``.
Wrap = Callable[[object, str, str], None]


class WorkItem(NamedTuple):
    """A batch to compute a gradient of.

    Attributes:
        step: The 0-based step that the gradient is for.
        position: Index of its first example in the endless stream of examples.
    """

    step: int
    position: int


class Turn(Enum):
    """What ``Strategy.next`` returns if there is no work item."""

    PAUSE = "all workers are paused at the requested step, and wait for the chief"
    END = "training is over"


class StepResult(NamedTuple):
    """The result of a step for this worker.

    Attributes:
        loss: Mean loss over the step's examples, as far as this worker knows it.
        updated: False if the gradient was discarded because it was not finite or came too late.
    """

    loss: float
    updated: bool


class Totals(NamedTuple):
    """Totals over all workers since this run began.

    Attributes:
        loss: Sum of the losses of steps.
        steps: Number of steps in that sum.
        skipped: Number of steps skipped because their loss was not finite.
        worker_stats: Statistics of each worker; empty if all workers take the same steps.
    """

    loss: float
    steps: int
    skipped: int
    worker_stats: list[WorkerStats]


class Strategy(Protocol):
    """Updates the parameters with this rank's gradients.

    Attributes:
        params: Shape (layout.size,): the parameters that the model computes with; read-only.
        grads: Shape (layout.size,): written by the model's backward pass.
        has_average: Whether there are moving averages of the parameters.
        vectors: The names of the vectors in a checkpoint: ``params``, the optimizer's slots and ``average``.
        lockstep: Whether all workers are at the same step whenever ``finish`` returns.
        paused: In lockstep: whether this is the step requested by ``pause_soon``; the same on all workers.
        step: Number of completed steps.
        data_cursor: Number of examples taken from the endless stream.
        on_device: Whether ``params`` and ``grads`` lie on this worker's device, and ``begin`` takes the loss as the
            replica's ``forward`` returns it.
        loss_scale: Factor for the loss's gradient, on the device; None for 1.
    """

    on_device: bool
    loss_scale: Array | None
    params: Array
    grads: Array
    has_average: bool
    vectors: list[str]
    lockstep: bool
    paused: bool
    step: int
    data_cursor: int

    @property
    def settled(self) -> bool:
        """Whether the workers have the same parameters after this step."""

    @property
    def extra_state(self) -> Mapping[str, float]:
        """Further state for a checkpoint, by name; in lockstep the same on all workers. Local, after ``gather``."""

    def pause_at(self, step: int) -> None:
        """Pause all workers at a later step; chief only, and only without lockstep: ``next`` then returns PAUSE."""

    def pause_soon(self) -> None:
        """Ask the workers to reach a step at which a checkpoint can be taken; chief only. In lockstep
        ``paused`` returns whether they have; otherwise ``next`` does."""

    def next(self) -> WorkItem | Turn:
        """Return what to do next; may block."""

    def begin(self, loss: Any) -> None:
        """Set this rank's share of the step's loss; call before ``ready``. Local."""

    def ready(self, start: int) -> None:
        """Declare ``grads[start:]`` final; called with decreasing ``start``, finally 0. Local."""

    def finish(self) -> None:
        """Submit the gradient. Collective over the workers in lockstep, else local."""

    @property
    def result(self) -> StepResult:
        """The result of the last step; waits for it if it is still being computed."""

    def stop(self) -> None:
        """Ask all workers to stop soon. Local; one rank is enough."""

    def close(self) -> None:
        """Reach the final parameters, the same on all workers. Collective over the workers."""

    def gather(self, name: str) -> Array:
        """Return one of ``vectors``, complete. Collective over the workers in lockstep, else local."""

    def on_device_copy(self, name: str) -> Array:
        """Like ``gather``, but return the vector on this worker's device if the parameters live there."""

    def totals(self) -> Totals:
        """Return the totals of all workers; on the chief."""

    def trace(self, wrap: Wrap) -> None:
        """Record the calls that communicate, wait or update. Local; call before training."""

    def free(self) -> None:
        """Free memory. Collective over all ranks."""


def non_finite_error(losses: Array, step: int, on_all_ranks: bool = False) -> NonFiniteLoss:
    """Return the error that names the workers whose loss is not finite.

    Args:
        losses: Shape (workers,). If all are finite, their sum is not.
        on_all_ranks: Whether all workers have all losses, and so raise the same error.
    """
    found = np.flatnonzero(~np.isfinite(losses))
    ranks = [str(rank) for rank in (found if len(found) else range(len(losses)))]
    worker = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(ranks[:8])}{' ...' * (len(ranks) > 8)}"
    error = NonFiniteLoss(
        f"the loss is {losses[int(ranks[0])]} at step {step + 1:,} on {worker}; "
        "lower the learning rate, clip the gradient, or pass --nan skip or --nan ignore to continue"
    )
    error.on_all_ranks = on_all_ranks
    return error
