"""The training examples of a script."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..data.split import Split
from ..errors import JobError
from ..pytorch.batches import as_tensors
from ..training.stepped_loop import SteppedLoop
from .script_run import ScriptRun


def check_count(name: str, value: Any, minimum: int) -> None:
    """Check an argument of ``Trainer.loader``.

    Raises:
        JobError: It is not an integer, or less than ``minimum``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise JobError(f"trainer.loader got {name}={value!r}: must be an integer, at least {minimum}")


class TrainLoader:
    """This worker's batches of the training examples; see ``Trainer.loader``.

    Attributes:
        dataset: As given to ``Trainer.loader``.
        split: The examples.
        batch_size: Examples in one batch.
    """

    def __init__(
        self, trainer: ScriptRun, split: Split, batch_size: int, dataset: Any, pin_memory: bool = False
    ) -> None:
        check_count("batch_size", batch_size, 1)
        self._trainer, self.split, self.batch_size = trainer, split, batch_size
        self.dataset, self._pin_memory = dataset, pin_memory

    def __len__(self) -> int:
        """Return the number of batches of an epoch for one worker, rounded up."""
        return math.ceil(len(self.split) / (self.batch_size * self._trainer.size))

    def __iter__(self) -> Iterator[Any]:
        trainer = self._trainer
        loop = trainer._require_loop()
        assert trainer._epoch is not None
        # The last epoch has all remaining steps: with backup workers, some batches do not count.
        end = (trainer._epoch + 1) * len(self.split) if trainer._epoch < trainer._last else math.inf
        try:
            while not self._has_ended(loop) and (work := loop.take()) is not None and loop.start_of(work) < end:
                yield self.next_batch(loop)
                self.check_used(loop)
            trainer._has_more = False
        finally:
            trainer._micro_batches.clear()

    def next_batch(self, loop: SteppedLoop) -> Any:
        """Return the batch of the work item that the loop has taken, or of its next part, as tensors."""
        batch = loop.micro_batch()
        self._trainer._begin_micro_batch(batch.position)
        return as_tensors(batch, self._trainer.device, self._pin_memory)

    def check_used(self, loop: SteppedLoop) -> None:
        """Check that the script has computed the gradient of the last batch.

        Raises:
            JobError: The script has not computed it.
        """
        if loop.is_pending:
            raise JobError("a batch was skipped: call trainer.backward for every batch of the loader")

    def _has_ended(self, loop: SteppedLoop) -> bool:
        """Return whether the epoch has no further step; code after the loop then runs before the next checkpoint."""
        assert self._trainer._epoch is not None
        loop.finish_pending()
        return loop.synchronous and loop.data_cursor >= (self._trainer._epoch + 1) * len(self.split)
