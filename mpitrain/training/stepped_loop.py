"""A training loop whose steps are driven by a script's own loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from ..core.layout import Array
from ..data.batch import Batch
from ..data.random_numbers import LOOP_STREAM, seed_all
from ..errors import JobError
from ..models.base import SteppedModel
from ..monitor.trace import span
from ..optim import Optimizer
from ..plan.progress import WorkItem
from ..strategy.base import Strategy
from .loop import FORWARD, HOOKS, LOAD, STEP, Loop
from .script_step import ScriptStep

_WAIT = span("wait")


class _Phase(Enum):
    """How far the first unfinished micro-batch has got."""

    WAITS = 0  # there is none, or the script does not have it yet
    FORWARD = 1  # the script computes its loss
    COMPUTED = 2  # it has had a backward pass


class SteppedLoop(Loop):
    """Computes a step in parts: ``take``, ``micro_batch``, ``backward``, ``update``.

    ``backward`` may be called several times for a batch, and ``update`` may be left out: gradients that no update has
    applied stay for the next step. With one optimizer, ``update`` ends the step. Otherwise, or if ``update`` was left
    out, the step ends when the next batch is taken. With gradient accumulation, the last three calls are repeated for
    each micro-batch of a step. The script sees no gradient before the last one, and only then gradients are averaged
    and applied.

    Attributes:
        n_updates: Number of calls of ``update``.
        had_work: Whether this worker has got a work item; None before the first ``take``.
        averages: Whether ``backward`` averages gradients over the workers, in modes that do.
    """

    reuses_batches = False
    shows_vectors = True
    n_updates = 0
    had_work: bool | None = None
    averages = True

    _stepped_model: SteppedModel
    _script_step: ScriptStep
    _n_optimizers = 1
    # Whether the script must not change parameters, because other ranks share them or the model has copies of them.
    _checks_params = False
    _work: WorkItem | None = None  # the work item, until its step is finished
    _parts: list[Batch]  # the unfinished micro-batches of a batch
    _batches_left = 0  # batches of this step that are not loaded yet
    _phase = _Phase.WAITS  # of ``_parts[0]``
    # The spans that are open between two calls: that of the step, and that of the forward pass inside it.
    _step_span: contextlib.ExitStack
    _forward_span: contextlib.ExitStack

    def open(self, optimizers: Sequence[Collection[str] | None] = (None,)) -> None:
        """Begin to train. Collective over the workers.

        Args:
            optimizers: The names of the parameters that each optimizer updates; None for all.
        """
        self._parts, self._n_optimizers = [], len(optimizers)
        self._step_span, self._forward_span = contextlib.ExitStack(), contextlib.ExitStack()
        model = self._stepped_model = self._model.stepped
        model.use_device()
        virtual = self._accumulation if self.plan.config.virtual_workers else None
        workers = self.cluster.workers.size
        self._script_step = ScriptStep(self._strategy, model, self.plan.layout, workers, optimizers, virtual)
        self._checks_params = self._strategy.shares_params or model.copies_params
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
        """Run the block in evaluation mode, in ``local`` with the first worker's parameters, as a learner with the
        common ones; then restore both. Collective over the workers if they take the same steps.

        Raises:
            JobError: A step is in progress.
        """
        self.check_ends_step("trainer.evaluate")
        if self._n_optimizers > 1:
            self.finish_pending()
        if self._parts or self._batches_left:
            raise JobError(
                "trainer.evaluate was called between backward and step: call it after step, or after an epoch",
                on_all_ranks=self.synchronous,
            )
        strategy, common = self._strategy, self.common()
        averages = self.plan.config.mode.averages_params
        with self._model.activate():
            own = strategy.params.copy() if averages or common is not None else None
        if common is not None:
            strategy.set_params([(0, common)])
        elif averages:
            with _WAIT:
                self.cluster.workers.Bcast(strategy.params, root=0)
        try:
            self._model.load_params()
            began = time.perf_counter()
            with self._stepped_model.inference():
                yield
            self.paused_s["validation"] += time.perf_counter() - began
        finally:
            if own is not None:
                strategy.set_params([(0, own)])
                self._model.load_params()

    def finish_pending(self) -> None:
        """Finish the micro-batch if it has had a backward pass, and the step if it was its last micro-batch."""
        if self._phase is _Phase.COMPUTED:
            self._check_params()
            with np.errstate(all="ignore"):
                self._finish_part()

    @property
    def is_pending(self) -> bool:
        """Whether a micro-batch was handed out whose gradient is not computed yet."""
        return self._phase is _Phase.FORWARD

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update with the options of this optimizer from now on. Local; all workers must set the same options.

        Raises:
            JobError: The options cannot change in this mode, or on this device.
        """
        self._strategy.set_optimizer(optimizer)

    def change_params(self, change: Callable[[], object]) -> None:
        """Change the parameters by a function; see ``Trainer.change_parameters``."""
        self.check_ends_step("trainer.change_parameters")
        with np.errstate(all="ignore"):
            self._script_step.change_params(change)
        self.n_updates += 1
        self._record_params()

    def show_params(self) -> None:
        self._model.load_params()
        self._stepped_model.show_params()
        self._record_params()

    def slots(self) -> tuple[dict[str, Array], int]:
        """Return the optimizer's slots by name, shape (layout.size,) each, and the number of updates.

        The slots are valid until the next step. Collective over the workers.
        """
        strategy = self.check_slots("state_dict")
        return {name: strategy.vector(name) for name in self.plan.optimizer.slots}, strategy.rule_step

    def set_slots(self, slots: Mapping[str, Array], updates: int) -> None:
        """Set the values that ``slots`` returns. Collective over the workers."""
        self.check_slots("load_state_dict").set_slots(slots, updates)

    def check_slots(self, method: str) -> Strategy:
        """Return the strategy, for a method of the optimizer that uses the slots. Local.

        Raises:
            JobError: Slots cannot be used now, or in this mode.
        """
        if not self._strategy.has_slots:
            raise JobError(
                f"optimizer.{method} needs --mode sync or local on CPUs; in other runs, "
                f"only the checkpoints contain the state"
            )
        if self._phase is _Phase.COMPUTED and self._n_optimizers == 1:
            raise JobError(f"optimizer.{method} was called between backward and step: call it after step")
        return self._strategy

    def start_of(self, work: WorkItem) -> int:
        """Return the position of the step's first example, among all workers' batches if they take the same steps."""
        return self.data_cursor if self.synchronous else work.position

    def micro_batch(self) -> Batch:
        """Return the examples of the work item, or of its next part, and prepare the model's forward pass."""
        assert self._work is not None
        if not self._parts:
            is_first = not self._batches_left
            if is_first:
                self._check_params()  # before copies of the parameters are made again
                self._step_span.enter_context(STEP)
                self._batches_left = self._work.batches
            with LOAD:
                batch = self._loader.batch(*self._work.batch(self._work.batches - self._batches_left))
            self._batches_left -= 1
            if is_first:
                self._accumulation.begin(batch)
            self._parts = self._accumulation.parts(batch, self._work.micro_batches)
            self._script_step.begin_batch()
        part = self._parts[0]
        if self._phase is _Phase.WAITS:
            self._forward_span.enter_context(FORWARD)
            self._phase = _Phase.FORWARD
            if self.plan.config.virtual_workers:
                seed_all(self.plan.config.training.seed, part.position, LOOP_STREAM)
            self._script_step.begin_micro_batch()
        self._stepped_model.begin_forward(part.position, self._script_step.has_gradient)
        return part

    def backward(self, loss: Any, optimizers: Sequence[int] = (0,)) -> None:
        """Compute the gradient of a loss, the mean over the micro-batch, and average it if ``averages``.

        Collective over the workers if it averages and they take the same steps.

        Args:
            optimizers: The indices of the optimizers whose parameters get the gradient.

        Raises:
            NonFiniteLoss: The loss is not finite and ``nan`` is ``stop``.
        """
        if self._phase is _Phase.WAITS:
            raise JobError("backward was called without a batch, or after step: call it before step, for each batch")
        self._check_params()
        is_last = self._is_last
        if self._phase is _Phase.FORWARD:
            self._forward_span.close()
            if is_last:
                self.compute_s += time.perf_counter() - self._step_began
        self._phase = _Phase.COMPUTED
        with np.errstate(all="ignore"):
            self._script_step.backward(loss, self._parts[0].count, optimizers, self.averages and is_last, not is_last)
        if is_last and self.plan.config.virtual_workers:
            assert self._work is not None
            # For what the script does once in a step: ranks have had different micro-batches.
            position = -1 - self.start_of(self._work)
            seed_all(self.plan.config.training.seed, position, LOOP_STREAM)
            self._stepped_model.seed(position)

    def update(self, optimizers: Sequence[int] = (0,)) -> None:
        """Update with the gradient, if this is the last micro-batch. Collective as ``Strategy.update``.

        Args:
            optimizers: The indices of the optimizers that update, if they have a gradient.
        """
        if self._phase is not _Phase.COMPUTED or not self._script_step.can_update(optimizers):
            raise JobError("step was called without a gradient: call trainer.backward(loss) first")
        self._check_params()
        self.n_updates += 1
        with np.errstate(all="ignore"):
            if self._is_last:
                self._script_step.update(optimizers)
                self._record_params()
            if self._n_optimizers == 1:
                self._finish_part()

    def _finish_part(self) -> None:
        """End a micro-batch; after the last one, end the step, show the parameters to the script, and call hooks."""
        self._phase, is_last = _Phase.WAITS, self._is_last
        self._parts.pop(0)
        if not is_last:
            return
        self._script_step.end()
        self._stepped_model.show_params()
        self._step_span.close()
        self._work = None
        with HOOKS:
            for after_step in self._after_step:
                after_step(self)
        self._record_params()

    @property
    def ends_step(self) -> bool:
        """Whether the script has the last micro-batch of a step, or no micro-batch of an unfinished step."""
        return self._is_last if self._phase is not _Phase.WAITS else not (self._parts or self._batches_left)

    def check_ends_step(self, method: str) -> None:
        """Check that a method is not called before the last micro-batch of a step, of which ranks may have several.

        Raises:
            JobError: It is, and there are virtual workers.
        """
        if self.plan.config.virtual_workers and not self.ends_step:
            raise JobError(
                f"{method} was called before the last micro-batch of a step: with --virtual-workers, call it only if "
                "trainer.sync_gradients, or after an epoch"
            )

    @property
    def _is_last(self) -> bool:
        """Whether the micro-batch is the last one of the step."""
        return len(self._parts) == 1 and not self._batches_left

    @property
    def grads(self) -> Array:
        self._strategy.fetch_grads()
        shown = self._strategy.shown_grads
        return super().grads if shown is None else shown

    def _record_params(self) -> None:
        if self._checks_params:
            self._stepped_model.record_params()

    def _check_params(self) -> None:
        """Check that the script has not changed parameters directly since the last update."""
        if self._checks_params:
            self._stepped_model.check_params()
        if self.step & (self.step + 1) == 0:  # steps 0, 1, 3, 7 ...: a check takes time
            self._stepped_model.check_data_pointers()
