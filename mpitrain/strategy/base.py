"""What every mode offers the training loop: work to do, parameters to read, a gradient to fill, an end to each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..core.layout import Array
from ..errors import NonFiniteLoss
from ..monitor.worker_stats import WorkerStats

# Given an object, the name of a method and a kind of span: has every call recorded. See ``monitor.trace``.
Wrap = Callable[[object, str, str], None]


class WorkItem(NamedTuple):
    """A batch to compute a gradient of.

    Attributes:
        step: The 0-based step that it is for.
        position: Of its first example in the endless stream of examples.
    """

    step: int
    position: int


class Turn(Enum):
    """What else there may be to do."""

    PAUSE = "all stand still at the step asked for, and wait for the chief"
    END = "training is over"


class StepResult(NamedTuple):
    """How a step ended for this worker.

    Attributes:
        loss: Mean loss over the step's examples, as far as this worker knows it.
        updated: False where the gradient was left out, since it was not finite or came too late.
    """

    loss: float
    updated: bool


class Totals(NamedTuple):
    """What all workers have done since this run began.

    Attributes:
        loss: Sum of the losses of steps.
        steps: Steps in that sum.
        skipped: Steps that were left out, since their loss was not finite.
        accounts: What each worker has done; empty where all do the same.
    """

    loss: float
    steps: int
    skipped: int
    worker_stats: list[WorkerStats]


class Strategy(Protocol):
    """Turns this rank's gradient into the parameters for the next.

    Attributes:
        params: Shape (layout.size,): what the model computes with. Not to be written.
        grads: Shape (layout.size,): where the model's backward pass writes.
        has_average: Whether there are moving averages of the parameters.
        vectors: Names of ``params``, the optimizer's slots and ``average``: what a checkpoint holds.
        lockstep: Whether all workers are at the same step whenever ``finish`` returns.
        paused: In lockstep: whether this is the step that ``pause_soon`` asked for, on all workers alike.
        step: Steps done.
        position: Examples taken from the endless stream: where the data goes on.
        on_device: Whether ``params`` and ``grads`` lie on this worker's device, and ``begin`` takes the loss as the
            replica's ``forward`` returns it.
        loss_scale: What the loss's gradient is to be multiplied by, on the device; None for 1.
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
        """What a checkpoint holds of the run's state beside vectors, step and position, by name; where ``lockstep`` the
        same on all workers. Local, after ``gather``."""

    def pause_at(self, step: int) -> None:
        """Have all workers stand still at a step after the present one; the chief's alone, and only where the modes
        keep no common pace: ``next`` then tells the chief when they do."""

    def pause_soon(self) -> None:
        """Have all workers come to where a checkpoint can be taken; the chief's. In lockstep ``paused`` tells when that
        is, else ``next``."""

    def next(self) -> WorkItem | Turn:
        """What to do next; may wait for others."""

    def begin(self, loss: Any) -> None:
        """Announce this rank's share of the step's loss, before anything is ``ready``; local."""

    def ready(self, start: int) -> None:
        """Say that ``grads[start:]`` is complete; called with falling ``start``, at last with 0; local."""

    def finish(self) -> None:
        """Hand in the gradient; where ``lockstep`` collective over the workers."""

    @property
    def result(self) -> StepResult:
        """How the last step ended; waits for it, where its work goes on beside this."""

    def stop(self) -> None:
        """Ask all workers to end soon; local, and enough on one rank."""

    def close(self) -> None:
        """Come to the last parameters, which all workers then have; collective over the workers."""

    def gather(self, name: str) -> Array:
        """One of ``vectors``, whole. Where ``lockstep`` collective over the workers, else local."""

    def on_device_copy(self, name: str) -> Array:
        """As ``gather``, but where this worker computes: on its device, if the parameters live there."""

    def totals(self) -> Totals:
        """What all workers have done; on the chief."""

    def trace(self, wrap: Wrap) -> None:
        """Have the calls recorded that communicate, wait or update; local, before training."""

    def free(self) -> None:
        """Give memory back; collective over all ranks."""


def non_finite_error(losses: Array, step: int, on_all_ranks: bool = False) -> NonFiniteLoss:
    """The error that names the workers whose loss is not finite.

    Args:
        losses: Shape (workers,). If all are finite, their sum is not.
        everywhere: Whether all workers see all losses, and so raise the same error.
    """
    found = np.flatnonzero(~np.isfinite(losses))
    ranks = [str(rank) for rank in (found if len(found) else range(len(losses)))]
    worker = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(ranks[:8])}{' ...' * (len(ranks) > 8)}"
    error = NonFiniteLoss(
        f"the loss is {losses[int(ranks[0])]} at step {step + 1:,} on {worker}; "
        "lower the learning rate or clip the gradient, or pass --nan skip or --nan ignore to go on"
    )
    error.on_all_ranks = on_all_ranks
    return error
