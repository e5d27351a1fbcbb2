"""The optimizers of a script, and how a Trainer updates with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from .. import optim
from ..errors import JobError
from ..pytorch.live_optimizer import LiveOptimizer, Options, check_same_options, live_optimizer
from ..pytorch.several_optimizers import as_one
from ..training.stepped_loop import SteppedLoop
from .script_run import ScriptRun
from .script_state import ScriptState


class ScriptOptimizers:
    """The optimizers of torch that a Trainer updates with, or an optimizer of this package.

    Args:
        trainer: The Trainer.
        optimizer: An optimizer of torch, several, or an optimizer of this package.
        clip_norm, scheduler, scheduler_interval: See ``Trainer``.

    Attributes:
        live: The optimizers of torch.
        rule: The optimizer of this package that performs the updates of all of them.

    Raises:
        JobError: An argument is not valid, or the arguments contradict each other.
    """

    def __init__(
        self, trainer: ScriptRun, optimizer: Any, clip_norm: float | None, scheduler: Any, scheduler_interval: str
    ) -> None:
        self._trainer, self._by_epoch = trainer, scheduler_interval == "epoch"
        self._with_state: list[LiveOptimizer] = []  # optimizers whose state the script has set before training
        self.live: list[LiveOptimizer] = []
        self._partial_options: list[Options] | None = None  # of the optimizers before the last micro-batch of a step
        if scheduler_interval not in ("epoch", "step"):
            raise JobError(f"scheduler_interval is {scheduler_interval!r}, must be 'epoch' or 'step'")
        several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        if not several:
            raise JobError("Trainer got a list without an optimizer: must have at least one")
        has_options = scheduler is not None or clip_norm is not None
        if isinstance(optimizer, optim.Optimizer):
            if has_options:
                raise JobError("scheduler and clip_norm are options of the optimizers of mpitrain.optim")
            self.rule: optim.Optimizer = optimizer
        elif len(several) == 1:
            self.live = [live_optimizer(several[0], trainer.model, clip_norm, scheduler, _Owner(trainer, self, 0))]
            self.rule = self.live[0].rule
        else:
            if has_options:
                raise JobError(
                    "scheduler and clip_norm of the Trainer need one optimizer: with several, call scheduler.step() "
                    "and torch.nn.utils.clip_grad_norm_ in the loop"
                )
            self.live = [
                live_optimizer(one, trainer.model, None, None, _Owner(trainer, self, index), index)
                for index, one in enumerate(several)
            ]
            self.rule = as_one(self.live, trainer.model)

    @property
    def parameter_names(self) -> Sequence[Collection[str] | None]:
        """The names of the parameters of each optimizer; None for all, if there is one optimizer."""
        return [live.parameter_names for live in self.live] if len(self.live) > 1 else [None]

    def add_parts(self, script: ScriptState) -> None:
        """Save the options and schedulers of the optimizers with the state of the script."""
        for index, live in enumerate(self.live):
            name = "optimizer" if len(self.live) == 1 else f"optimizer {index}"
            script.add_part(name, partial(self._state_of, live), live.load_state)

    def chosen(self, optimizer: Any, method: str) -> Sequence[int]:
        """Return the index of ``optimizer``, the argument of a Trainer's method, as a list; if None, all indices.

        Raises:
            JobError: The Trainer does not have this optimizer.
        """
        if optimizer is None:
            return range(max(1, len(self.live)))
        indices = [index for index, live in enumerate(self.live) if live.is_of(optimizer)]
        if not indices:
            raise JobError(f"trainer.{method} got an optimizer that the Trainer does not have: pass it to the Trainer")
        return indices

    def update(self, loop: SteppedLoop, indices: Sequence[int]) -> None:
        """Update the parameters with these optimizers. Collective over the workers if they take the same steps."""
        if loop.plan.config.virtual_workers is not None:
            if not (loop.ends_step and self._trainer._has_asked):
                self.check_options()
            self._partial_options = None if loop.ends_step else [live.options for live in self.live]
        for live in [self.live[index] for index in indices] if self.live else []:
            if live.has_changed():
                loop.set_optimizer(live.rule)
            live.note_step()
        loop.update(indices)
        self.advance_schedulers(loop)

    def check_options(self) -> None:
        """Check that no option has changed since the last ``update``, unless that was the last one of its step.

        Raises:
            JobError: One has changed: ranks have different numbers of micro-batches.
        """
        if self._partial_options not in (None, [live.options for live in self.live]):
            raise JobError(
                "options of the optimizer, such as its learning rate, were changed before the last micro-batch of a "
                "step: with --virtual-workers, change them, or call a scheduler, only if trainer.sync_gradients"
            )

    def advance_schedulers(self, loop: SteppedLoop) -> None:
        """Call the scheduler of the Trainer as often as its interval has passed. Local."""
        if self.live:
            examples = loop.data_cursor if loop.synchronous else loop.step * loop.plan.step_examples
            self.live[0].advance_scheduler(examples // self._trainer._examples if self._by_epoch else loop.step)

    def check_states(self) -> None:
        """Find the optimizers that the script has given a state before training. Collective over the workers."""
        self._with_state = [live for live in self.live if self.has_state(live)]

    def has_state(self, live: LiveOptimizer) -> bool:
        """Return whether an optimizer was given a state, the same on all workers. Collective over the workers.

        Raises:
            JobError: The workers have different states.
        """
        try:
            return live.check_state(self._trainer._gather_of_ranks)
        except JobError as error:
            error.on_all_ranks = error.on_all_ranks and not self._trainer._rank.cluster.servers
            raise

    def begin(self, loop: SteppedLoop) -> None:
        """Begin to train, with the states that the script has set unless the run resumes. Collective over workers."""
        for live in self.live:
            if live not in self._with_state or loop.step:  # a resumed run uses the state in its checkpoint
                live.drop_state()
                continue
            try:
                live.use_state(loop)
            except JobError as error:
                error.on_all_ranks = not self._trainer._rank.cluster.servers
                raise

    def _state_of(self, live: LiveOptimizer) -> dict[str, Any]:
        """Return the state of an optimizer that checkpoints contain besides its slots. Collective over the workers.

        Raises:
            JobError: The workers take the same steps with different options.
        """
        if not self._trainer._config.uses_servers:
            check_same_options(self._trainer._gather_of_ranks(live.options_of_script))
        return live.state()


class _Owner:
    """Connects an optimizer of torch with its Trainer; implements ``pytorch.live_optimizer.Owner``.

    While the Trainer trains, all methods but ``drop_state`` are collective over the workers. Before training, the
    methods for the state do nothing.
    """

    def __init__(self, trainer: ScriptRun, optimizers: ScriptOptimizers, index: int) -> None:
        self._trainer, self._optimizers, self._index = trainer, optimizers, index

    def step(self) -> None:
        self._optimizers.update(self._trainer._require_loop(), [self._index])

    def collect_state(self) -> None:
        if (loop := self._training("state_dict")) is not None:
            gather = None if loop.plan.config.mode.averages_params else self._trainer._gather_of_ranks
            self._live.set_state(loop, gather)

    def drop_state(self) -> None:
        if self._training("") is not None:
            self._live.drop_state()

    def use_state(self) -> None:
        if (loop := self._training("load_state_dict")) is not None:
            # In modes that average parameters, each worker has its own state.
            if not loop.plan.config.mode.averages_params:
                self._optimizers.has_state(self._live)
            self._live.use_state(loop)

    @property
    def _live(self) -> LiveOptimizer:
        return self._optimizers.live[self._index]

    def _training(self, method: str) -> SteppedLoop | None:
        """Return the loop after all workers have called this method of the optimizer; None before training."""
        loop = self._trainer._loop
        if loop is None and self._trainer._epoch is not None:
            raise JobError(f"optimizer.{method} was called after training: call it in the loop, after step")
        if loop is None:
            return None
        if method:
            loop.check_slots(method)
            self._trainer._wait_for_workers(f"optimizer.{method}")
        return loop
