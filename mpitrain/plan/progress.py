"""The progress of training: its position, and the next action of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the launcher needs no kernels
    from ..optim.schedule import EpochCounter


class Progress(NamedTuple):
    """The progress of training.

    Attributes:
        step: Number of completed steps; of all workers together in modes with servers.
        data_cursor: Number of examples taken from the endless stream.
    """

    step: int
    data_cursor: int


@dataclass
class RunLength:
    """The length of a run in steps; if epochs are given, it depends on the progress at which training begins.

    Only ``begin`` changes it, which ``training.setup`` and ``training.restore`` call on all ranks alike.

    Attributes:
        epochs: Counts the epochs, also for schedules.
        steps: Number of steps; None if epochs are given.
        n_epochs: Number of epochs; None if steps are given.
        uses_all: Whether every example of the data cursor is used, so that the cursor counts epochs.
    """

    epochs: EpochCounter
    steps: int | None
    n_epochs: int | None
    uses_all: bool
    _has_begun: bool = False

    def begin(self, progress: Progress) -> None:
        """Count the epochs from this progress."""
        self._has_begun = True
        if self.uses_all:
            self.epochs.start = progress

    @property
    def train_steps(self) -> int:
        """Number of training steps.

        Raises:
            RuntimeError: Epochs are given, and ``begin`` was not called.
        """
        if self.n_epochs is None:
            assert self.steps is not None
            return self.steps
        if not self._has_begun:
            raise RuntimeError("the number of steps depends on where training begins: call begin first")
        return self.epochs.steps_until(self.n_epochs)


class Share(NamedTuple):
    """What a worker computes of a step: consecutive batches, divided into micro-batches, whose gradients it adds up.

    In ``local``, it adds up the gradients of one batch, and updates with each sum the parameters of one virtual worker.

    Attributes:
        offset: Index of its first example among those of the step.
        batches: Number of batches: 1 without virtual workers.
        micro_batches: Number of examples of each micro-batch of a batch.
        additions: For each sum of gradients that the worker computes, usually one: how many additions follow each of
            its micro-batches; see ``core.sum_tree.additions``.
    """

    offset: int
    batches: int
    micro_batches: tuple[int, ...]
    additions: tuple[tuple[int, ...], ...]


class WorkItem(NamedTuple):
    """Consecutive batches for which a worker computes a gradient.

    Attributes:
        step: The 0-based step that the gradient is for.
        position: Index of the first example in the endless stream of examples.
        micro_batches: Number of examples of each micro-batch of a batch; the batch has their sum.
        batches: Number of batches.
    """

    step: int
    position: int
    micro_batches: tuple[int, ...]
    batches: int = 1

    def batch(self, index: int) -> tuple[int, int]:
        """Return the position of the first example of a batch, and its number of examples."""
        count = sum(self.micro_batches)
        return self.position + index * count, count


class ConsistentPoint(NamedTuple):
    """A pause in which no worker computes and the trained model is complete. The same on all workers.

    Attributes:
        step: Number of completed steps.
        data_cursor: Number of examples taken from the endless stream.
        reasons: Why the chief has requested the point (``TrainingLoop.request_pause``); empty for a regular point.
        last: Whether training ends here.
    """

    step: int
    data_cursor: int
    reasons: frozenset[str]
    last: bool
