"""A training loop whose steps are driven by a script's own loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..comm.mpi import MPI
from ..core.layout import Array
from ..data.batch import Batch
from ..errors import JobError
from ..models.base import DividedModel, SteppedModel
from ..monitor.trace import span
from ..optim import Optimizer
from ..plan.progress import WorkItem
from ..strategy.base import UpdatesOnRequest
from .divided_step import DividedStep
from .loop import BACKWARD, FORWARD, HOOKS, LOAD, STEP, Loop

_WAIT = span("wait")
_OVERLAPS = (
    "after a backward pass that has already averaged and applied them; this overlap is the default if the first step "
    "neither uses nor changes gradients: pass overlap=False to the Trainer"
)


class SteppedLoop(Loop):
    """Computes a step in parts: ``take``, ``micro_batch``, ``backward``, ``update``.

    If the script calls each of these once, and does nothing else with gradients, gradients are averaged and parameters
    updated during the backward pass. Otherwise a step is *divided*, if the strategy can divide steps. In a divided
    step, gradients are averaged when the script first uses them, or in ``update``. ``backward`` may be called several
    times, and ``update`` may be left out. The first step is divided until the script calls ``update``. If the script
    has needed a divided step by then, the later steps are divided, too. All workers make the same decision.

    With gradient accumulation, the last three calls are repeated for each micro-batch of a step, and no step is
    divided.

    With several optimizers, all steps are divided, and a step ends when the next batch is taken.

    Attributes:
        n_updates: Number of calls of ``update``.
        had_work: Whether this worker has got a work item; None before the first ``take``.
    """

    reuses_batches = False
    shows_vectors = True
    n_updates = 0
    had_work: bool | None = None

    _stepped_model: SteppedModel
    _divided: DividedStep | None = None  # set if steps can be divided
    _divided_model: DividedModel  # set if ``_divided`` is set
    _dividing: UpdatesOnRequest  # the strategy; set if ``_divided`` is set
    _n_optimizers = 1
    # Set if the script must not change parameters, because other ranks share them or the model has copies of them.
    _watched: DividedModel | None = None
    _overlaps: bool | None = None  # whether steps are not divided; None until this is decided in the first step
    _work: WorkItem | None = None  # the work item, until its step is finished
    _parts: list[Batch]  # the unfinished micro-batches of this step
    _in_forward = _computed = False  # whether ``_parts[0]`` was handed out, and whether its gradient is computed

    def open(self, overlap: bool | None = None, optimizers: Sequence[Collection[str] | None] = (None,)) -> None:
        """Begin to train. Collective over the workers.

        Args:
            overlap: Whether gradients are averaged during the backward pass; None to let the first step decide.
            optimizers: The names of the parameters that each optimizer updates; None for all.
        """
        self._parts, self._stepped_model = [], self._model.stepped
        self._stepped_model.use_device()
        self._overlaps = overlap
        strategy, model = self._strategy, self._stepped_model.divided
        is_accumulating = self.plan.config.training.accumulate_steps > 1
        if isinstance(strategy, UpdatesOnRequest) and model is not None and not is_accumulating:
            self._dividing, self._divided_model, self._n_optimizers = strategy, model, len(optimizers)
            workers = self.cluster.workers.size if self._averages_gradients else 1
            self._divided = DividedStep(strategy, model, self.plan.layout, workers, optimizers)
            if len(optimizers) > 1:
                self._overlaps = False
            model.watch_gradients(self._use_gradients)
        elif len(optimizers) > 1:
            raise JobError(
                "several optimizers need --mode sync or local on CPUs, without --accumulate-steps: "
                "change these flags, or use one optimizer"
            )
        elif overlap is False:
            raise JobError(
                "Trainer(overlap=False) needs --mode sync or local on CPUs, without --accumulate-steps: "
                "change these flags, or remove overlap=False"
            )
        self._watched = None
        if isinstance(strategy, UpdatesOnRequest) and model is not None:
            self._watched = model if strategy.shares_params or model.copies_params else None
        self._begin()
        self._record_params()

    def close(self) -> None:
        """End training. Collective over the workers."""
        self._check_params()
        self._end()

    def take(self) -> WorkItem | None:
        """Return the next work item, None at the end; the same item until its step is finished.

        May wait for other workers.
        """
        self.finish_pending()
        if self._work is None:
            with np.errstate(all="ignore"):
                self._work = self._next()
            self.had_work = bool(self.had_work) or self._work is not None
        return self._work

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Run the block in evaluation mode, in ``local`` with the first worker's parameters; then restore both.

        Collective over the workers if they take the same steps.

        Raises:
            JobError: A step is in progress.
        """
        if self._n_optimizers > 1:
            self.finish_pending()
        has_gradient = self._divided_step is not None and self._divided_step.n_backward > 0
        if self.is_pending or self._computed or has_gradient:
            raise JobError(
                "trainer.evaluate was called between backward and step: call it after step, or after an epoch"
            )
        averages_params = self.synchronous and not self._averages_gradients
        own = self._strategy.params.copy() if averages_params else None
        if own is not None:
            with _WAIT:
                self.cluster.workers.Bcast(self._strategy.params, root=0)
        try:
            self._model.load_params()
            with self._stepped_model.inference():
                yield
        finally:
            if own is not None:
                self._strategy.params[:] = own
                self._model.load_params()

    def finish_pending(self) -> None:
        """Finish a divided step that has had a backward pass, unless an update has already ended this step."""
        step = self._divided_step
        if self._work is not None and step is not None and step.n_backward:
            self._check_params()
            self._decide(divide=True)
            self._finish_divided(step)

    @property
    def overlaps(self) -> bool | None:
        """Whether steps are not divided; None if this is not decided yet, or if steps cannot be divided."""
        return None if self._divided is None else self._overlaps

    @property
    def is_pending(self) -> bool:
        """Whether a micro-batch was handed out whose gradient is not computed yet."""
        return self._in_forward

    @property
    def can_change_options(self) -> bool:
        """Whether options of the optimizer may change now, because no update that uses them has begun."""
        return self._divided_step is not None or not self._computed

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update with the options of this optimizer from now on. Local; all workers must set the same options.

        Raises:
            JobError: The options cannot change in this mode, or on this device.
        """
        if self._divided is None:
            raise JobError(
                "an option of the optimizer other than the learning rate was changed, which needs --mode sync or local "
                "on CPUs, without --accumulate-steps; for OneCycleLR and CyclicLR pass cycle_momentum=False"
            )
        self._dividing.set_optimizer(optimizer)

    def change_params(self, change: Callable[[], object], wait: Callable[[], object]) -> None:
        """Change the parameters by a function; see ``Trainer.change_parameters``.

        Args:
            wait: Waits for the other workers; called if steps are not divided.
        """
        if self._divided is None:
            raise JobError("trainer.change_parameters needs --mode sync or local on CPUs, without --accumulate-steps")
        if self._overlaps and self._computed:
            raise JobError(
                "trainer.change_parameters was called between backward and step: call it after step, or pass "
                "overlap=False to the Trainer"
            )
        if self._overlaps:
            wait()
        elif self._divided.n_backward:
            self._decide(divide=True)
        self._divided.change_params(change)
        self.n_updates += 1
        self._record_params()

    def slots(self) -> tuple[dict[str, Array], int]:
        """Return the optimizer's slots by name, shape (layout.size,) each, and the number of updates.

        The slots are valid until the next step. Collective over the workers.
        """
        strategy = self.check_slots("state_dict")
        return {name: self._strategy.vector(name) for name in self.plan.optimizer.slots}, strategy.rule_step

    def set_slots(self, slots: Mapping[str, Array], updates: int) -> None:
        """Set the values that ``slots`` returns. Collective over the workers."""
        self.check_slots("load_state_dict").set_slots(slots, updates)

    def check_slots(self, method: str) -> UpdatesOnRequest:
        """Return the strategy, for a method of the optimizer that uses the slots. Local.

        Raises:
            JobError: Slots cannot be used now, or in this mode.
        """
        if not isinstance(self._strategy, UpdatesOnRequest):
            raise JobError(
                f"optimizer.{method} needs --mode sync or local on CPUs; in other runs, "
                f"only the checkpoints contain the state"
            )
        if self._computed:
            raise JobError(f"optimizer.{method} was called between backward and step: call it after step")
        return self._strategy

    def start_of(self, work: WorkItem) -> int:
        """Return the position of the step's first example, among all workers' batches if they take the same steps."""
        return self.data_cursor if self.synchronous else work.position

    def micro_batch(self) -> Batch:
        """Return the examples of the work item, or of its next part, and prepare the model's forward pass."""
        assert self._work is not None
        if self._computed:
            raise JobError("step was not called after backward: call trainer.step() once for every batch")
        if not self._parts:
            self._check_params()  # before copies of the parameters are made again
            STEP.__enter__()
            with LOAD:
                batch = self._loader.batch(self._work.position, self.plan.batch)
            self._parts = self._accumulation.begin(batch)
        part = self._parts[0]
        if not self._in_forward:
            FORWARD.__enter__()
            self._in_forward = True
        self._stepped_model.begin_forward(part.position, self._divided is not None and self._divided.has_gradient)
        return part

    def backward(self, loss: Any, optimizers: Sequence[int] = (0,)) -> None:
        """Compute the gradient of a loss, the mean over the micro-batch. Ranges of the gradient may be averaged
        meanwhile.

        Args:
            optimizers: The indices of the optimizers whose parameters get the gradient.

        Raises:
            NonFiniteLoss: The loss is not finite and ``nan`` is ``stop``.
        """
        if not self._parts:
            raise JobError(
                "backward was called without a batch, or after step: call backward and then step once for each batch"
            )
        if not self._in_forward and self._divided_step is None:
            raise JobError(
                "backward was called twice for a batch, but only once in the first "
                "step: pass overlap=False to the Trainer"
                if self._divided is not None
                else "backward was called twice for a batch: call backward once for each batch of the loader"
            )
        self._check_params()
        if self._in_forward:
            FORWARD.__exit__(None, None, None)
        self._in_forward, strategy = False, self._strategy
        with np.errstate(all="ignore"):
            share = self._stepped_model.end_forward(loss, self._parts[0].count)
            if (step := self._divided_step) is not None:
                if not step.n_backward:
                    self.compute_s += time.perf_counter() - self._step_began
                step.backward(share, optimizers)
                return
            with BACKWARD:
                step_loss = self._accumulation.add(share)
                if step_loss is not None:
                    self.compute_s += time.perf_counter() - self._step_began
                    strategy.begin(step_loss)
                    self._accumulation.backward(on_ready=strategy.ready)
        self._computed = True
        if self._divided is None:
            self._version = self._stepped_model.gradient_version

    def update(self, optimizers: Sequence[int] = (0,), divide: bool = False) -> None:
        """Submit the gradient, if this is the last micro-batch. Collective as ``Strategy.finish``.

        Args:
            optimizers: The indices of the optimizers that update, if they have a gradient.
            divide: Whether steps must be divided, if that is not decided yet.
        """
        if (step := self._divided_step) is not None:
            self._update_divided(step, optimizers, divide)
            return
        if not self._computed:
            raise JobError("step was called without a gradient: call trainer.backward(loss) first")
        if self._divided is None and self._stepped_model.gradient_version != self._version:
            raise JobError(
                "gradients were changed after backward, which this mode, device or --accumulate-steps does not "
                "support; to clip them, pass clip_norm=... to the Trainer"
            )
        if self._divided is not None and self._divided_model.collect_replaced_grads():
            raise JobError(f"gradients are replaced {_OVERLAPS}")
        self._computed = False
        self.n_updates += 1
        self._parts.pop(0)
        if self._parts:
            return
        with np.errstate(all="ignore"):
            self._strategy.finish()
        self._finish()

    def _finish(self) -> None:
        """Clear the work item, show the parameters to the script, and call the hooks."""
        self._stepped_model.show_params()
        STEP.__exit__(None, None, None)
        self._work = None
        self._parts.clear()
        with HOOKS:
            for after_step in self._after_step:
                after_step(self)
        self._record_params()

    def _record_params(self) -> None:
        if self._watched is not None:
            self._watched.record_params()

    def _check_params(self) -> None:
        """Check that the script has not changed parameters directly since the last update."""
        if self._watched is not None:
            self._watched.check_params()
        if self._divided is not None and self.step & (self.step + 1) == 0:  # steps 0, 1, 3, 7 ...: a check takes time
            self._divided_model.check_data_pointers()

    # Divided steps.

    @property
    def _divided_step(self) -> DividedStep | None:
        """The gradients of this step; None if steps are not, or cannot be, divided."""
        return None if self._overlaps else self._divided

    def _decide(self, divide: bool) -> None:
        """Unless it is decided already, decide whether steps are divided: they are if ``divide`` is True on a worker.

        Collective over the workers in the first step.
        """
        if self._overlaps is None:
            with _WAIT:
                self._overlaps = not self.cluster.workers.allreduce(divide, op=MPI.LOR)

    @property
    def _averages_gradients(self) -> bool:
        """Whether the gradient of a step is averaged over all workers."""
        return self.synchronous and not self.plan.config.mode.averages_params

    def _use_gradients(self, clears: bool) -> None:
        """Average the gradient before the script uses it.

        Args:
            clears: Whether the script sets the gradient to zero, which is allowed at any time.
        """
        assert self._divided is not None
        if self._overlaps and (self._computed or not clears):
            raise JobError(f"gradients are used or changed {_OVERLAPS}")
        if self._divided.is_averaged or not self._divided.n_backward:
            return
        self._decide(divide=True)
        self._divided.average()

    def _update_divided(self, step: DividedStep, optimizers: Sequence[int], divide: bool) -> None:
        if not step.can_update(optimizers):
            raise JobError("step was called without a gradient: call trainer.backward(loss) first")
        self._check_params()
        has_replaced = self._divided_model.collect_replaced_grads()
        self._decide(divide=divide or has_replaced or step.n_backward > 1)
        self.n_updates += 1
        if self._overlaps:  # decided just now: this gradient is submitted as a whole
            self._strategy.begin(step.take_over())
            with np.errstate(all="ignore"):
                self._strategy.ready(0)
                self._strategy.finish()
            self._finish()
            return
        step.update(optimizers)
        self._record_params()
        if self._n_optimizers == 1:
            self._finish_divided(step)

    def _finish_divided(self, step: DividedStep) -> None:
        step.end()
        self._finish()
