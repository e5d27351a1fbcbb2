"""A training loop whose steps are driven by a script's own loop."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ..core.ranges import split_batch
from ..data.batch import Batch
from ..errors import JobError
from ..plan.progress import WorkItem
from .loop import BACKWARD, FORWARD, HOOKS, LOAD, STEP, Loop


class SteppedLoop(Loop):
    """Computes a step in parts, in this order: ``take``, ``micro_batch``, ``backward``, ``finish``.

    With gradient accumulation, the last three are repeated for each micro-batch of a step.
    """

    reuses_batches = False

    _work: WorkItem | None = None  # until its step is finished
    _parts: list[Batch]
    _index = 0  # of the micro-batch
    _in_forward = _computed = False  # whether it was handed out, and whether its gradient is computed
    _total: Any = 0.0  # the loss of the micro-batches of this step

    @property
    def _torch_model(self) -> Any:
        return self._model

    def open(self) -> None:
        """Begin to train. Collective over the workers."""
        self._parts = []
        self._torch_model.use_device()
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
            ranges = split_batch(batch.count, self.plan.config.training.accumulate_steps)
            self._parts = [batch.part(*each) for each in ranges] if len(ranges) > 1 else [batch]
            self._index, self._total = 0, 0.0
            self._model.load_params()
        part, model = self._parts[self._index], self._torch_model
        if not self._in_forward:
            FORWARD.__enter__()
            self._in_forward = True
        model.begin_forward(part.position)
        return part

    def backward(self, loss: Any) -> None:
        """Compute the gradient of a loss, the mean over the micro-batch. Ranges of it may be averaged meanwhile.

        Raises:
            NonFiniteLoss: The loss is not finite and ``nan`` is ``stop``.
        """
        if not self._in_forward:
            raise JobError("backward was called twice, or without a batch: call it once for each batch of the loader")
        FORWARD.__exit__(None, None, None)
        self._in_forward, model, strategy = False, self._torch_model, self._strategy
        with np.errstate(all="ignore"):
            share = model.end_forward(loss, self._parts[self._index].count)
            if self._index < len(self._parts) - 1:
                with BACKWARD:
                    self._total = model.accumulate(self._total, share, first=self._index == 0)
            else:
                if self._index:
                    with model.activate():
                        share = model.add_loss(self._total, share)
                self.compute_s += time.perf_counter() - self._step_began
                strategy.begin(share)
                with BACKWARD:
                    model.backward(on_ready=strategy.ready)
        self._computed, self._version = True, model.gradient_version

    def finish(self) -> None:
        """Submit the gradient, if it is that of the last micro-batch. Collective as ``Strategy.finish``."""
        if not self._computed:
            raise JobError("step was called without a gradient: call backward first, in place of loss.backward()")
        if self._torch_model.gradient_version != self._version:
            raise JobError(
                "gradients were changed after backward, when other workers may have used them already; to clip them, "
                "pass clip_norm=... to the Trainer"
            )
        self._computed = False
        if self._index < len(self._parts) - 1:
            self._index += 1
            return
        with np.errstate(all="ignore"):
            self._strategy.finish()
        STEP.__exit__(None, None, None)
        self._work, self._parts = None, []
        with HOOKS:
            for after_step in self._after_step:
                after_step(self)
