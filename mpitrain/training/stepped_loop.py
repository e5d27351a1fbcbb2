"""A training loop whose steps are driven by a script's own loop."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ..data.batch import Batch
from ..errors import JobError
from ..models.base import SteppedModel
from ..plan.progress import WorkItem
from .loop import BACKWARD, FORWARD, HOOKS, LOAD, STEP, Loop


class SteppedLoop(Loop):
    """Computes a step in parts, in this order: ``take``, ``micro_batch``, ``backward``, ``finish``.

    With gradient accumulation, the last three are repeated for each micro-batch of a step.
    """

    reuses_batches = False

    _stepped_model: SteppedModel
    _work: WorkItem | None = None  # until its step is finished
    _parts: list[Batch]  # the micro-batches of this step that are not finished
    _in_forward = _computed = False  # whether the first of them was handed out, and whether its gradient is computed

    def open(self) -> None:
        """Begin to train. Collective over the workers."""
        self._parts, self._stepped_model = [], self._model.stepped
        self._stepped_model.use_device()
        self._begin()

    def close(self) -> None:
        """End training. Collective over the workers."""
        self._end()

    def take(self) -> WorkItem | None:
        """Return the next batch to compute a gradient of, None at the end; the same until its step is finished.

        May wait for other workers.
        """
        if self._work is None:
            with np.errstate(all="ignore"):
                self._work = self._next()
        return self._work

    @property
    def is_pending(self) -> bool:
        """Whether a micro-batch was handed out whose gradient is not computed yet."""
        return self._in_forward

    def start_of(self, work: WorkItem) -> int:
        """Return the position of the first example of a step: of all workers' batches if they take the same steps."""
        return self.data_cursor if self.synchronous else work.position

    def micro_batch(self) -> Batch:
        """Return the examples of the work item, or of its next part, and prepare the model's forward pass."""
        assert self._work is not None
        if self._computed:
            raise JobError("step was not called after backward: call trainer.step() for every batch")
        if not self._parts:
            STEP.__enter__()
            with LOAD:
                batch = self._loader.batch(self._work.position, self.plan.batch)
            self._parts = self._accumulation.begin(batch)
        part = self._parts[0]
        if not self._in_forward:
            FORWARD.__enter__()
            self._in_forward = True
        self._stepped_model.begin_forward(part.position)
        return part

    def backward(self, loss: Any) -> None:
        """Compute the gradient of a loss, the mean over the micro-batch. Ranges of it may be averaged meanwhile.

        Raises:
            NonFiniteLoss: The loss is not finite and ``nan`` is ``stop``.
        """
        if not self._in_forward:
            raise JobError("backward was called twice, or without a batch: call it once for each batch of the loader")
        FORWARD.__exit__(None, None, None)
        self._in_forward, strategy = False, self._strategy
        with np.errstate(all="ignore"):
            share = self._stepped_model.end_forward(loss, self._parts[0].count)
            with BACKWARD:
                step_loss = self._accumulation.add(share)
                if step_loss is not None:
                    self.compute_s += time.perf_counter() - self._step_began
                    strategy.begin(step_loss)
                    self._accumulation.backward(on_ready=strategy.ready)
        self._computed, self._version = True, self._stepped_model.gradient_version

    def finish(self) -> None:
        """Submit the gradient, if it is that of the last micro-batch. Collective as ``Strategy.finish``."""
        if not self._computed:
            raise JobError("step was called without a gradient: call backward first, in place of loss.backward()")
        if self._stepped_model.gradient_version != self._version:
            raise JobError(
                "gradients were changed after backward, when other workers may have used them already; to clip them, "
                "pass clip_norm=... to the Trainer"
            )
        self._computed = False
        self._parts.pop(0)
        if self._parts:
            return
        with np.errstate(all="ignore"):
            self._strategy.finish()
        STEP.__exit__(None, None, None)
        self._work = None
        with HOOKS:
            for after_step in self._after_step:
                after_step(self)
