"""An optimizer of torch whose options a script or a scheduler changes during training."""

from __future__ import annotations

import gc
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..core.layout import Array
from ..errors import CheckpointError, JobError
from ..optim import Optimizer
from .names import parameters_of
from .optimizer_state import set_state, slots_of, state_digest
from .torch_rule import options_of
from .translation import GroupRate, translated
from .whole_tensors import TorchTensors, plain_options

_log = logging.getLogger(__name__)

Options = list[dict[str, Any]]  # options of each parameter group, with its learning rate


class HasSlots(Protocol):
    """A training loop; see ``training.stepped_loop.SteppedLoop``."""

    plan: Any

    def slots(self) -> tuple[dict[str, Array], int]: ...

    def set_slots(self, slots: Mapping[str, Array], updates: int) -> None: ...


class Owner(Protocol):
    """Holds the optimizer's state during training."""

    def step(self) -> None:
        """Update the parameters."""

    def collect_state(self) -> None:
        """Give the optimizer its state, before ``state_dict`` returns it."""

    def drop_state(self) -> None:
        """Take the state back, after ``state_dict`` has returned it."""

    def use_state(self) -> None:
        """Use the state that ``load_state_dict`` has given to the optimizer."""


class LiveOptimizer(ABC):
    """Tracks the options of an optimizer of torch, and calls or finds its schedulers. Local.

    Args:
        optimizer: Its methods call the methods of ``owner`` from now on: ``step``, ``state_dict`` and
            ``load_state_dict``.
        model: The model whose parameters the optimizer has.
        rule: The optimizer of this package that computes the same updates.
        rates: The learning rates of the groups at each update, which ``rule`` uses.
        scheduler: The scheduler that ``advance_scheduler`` calls, or None.

    Attributes:
        rule: As given, with the options of the last call of ``has_changed``.

    Raises:
        JobError: The scheduler is not supported.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        rule: Optimizer,
        rates: Sequence[GroupRate],
        scheduler: Any,
        owner: Owner,
    ) -> None:
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            raise JobError(f"Trainer(scheduler=...) got {type(scheduler).__name__}: must be an LRScheduler of torch")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise JobError(
                "Trainer(scheduler=...) got ReduceLROnPlateau, which needs a metric: call scheduler.step(value) "
                "in the loop instead, with the same value on all ranks, such as trainer.mean(loss)"
            )
        self._optimizer, self._model, self._rates = optimizer, model, rates
        self._scheduler, self._scheduler_steps = scheduler, 0
        self.rule = rule
        self._given = self.options
        _replace_step(optimizer, owner.step)
        optimizer.register_state_dict_pre_hook(lambda _: owner.collect_state())
        optimizer.register_state_dict_post_hook(lambda *_: owner.drop_state())
        optimizer.register_load_state_dict_post_hook(lambda _: owner.use_state())

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this object tracks ``optimizer``."""
        return self._optimizer is optimizer

    @property
    def parameter_names(self) -> list[str]:
        """The names of the parameters that the optimizer has."""
        own = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return [name for name, parameter in parameters_of(self._model) if id(parameter) in own]

    @property
    @abstractmethod
    def options(self) -> Options:
        """The present options of the groups."""

    @property
    @abstractmethod
    def options_of_script(self) -> Options:
        """The present options, without those that the optimizer itself has changed, perhaps on some ranks only."""

    def has_changed(self) -> bool:
        """Return whether ``rule`` has changed, because options other than the learning rate have.

        Raises:
            JobError: The options must not change in this way.
        """
        if len(self._optimizer.param_groups) != len(self._rates):
            raise JobError(
                "a parameter group was added to the optimizer during training: add it before making the Trainer"
            )
        return False

    @abstractmethod
    def set_state(self, loop: HasSlots, gather: Callable[[Any], list[Any]] | None) -> None:
        """Give the optimizer its state. Collective over the workers.

        Args:
            gather: Returns the values of all workers; None if each worker has all tensors.
        """

    @abstractmethod
    def drop_state(self) -> None:
        """Remove the state that is in slots, or on other ranks, from the optimizer. Local."""

    @abstractmethod
    def use_state(self, loop: HasSlots) -> None:
        """Train with the state that the optimizer has. Collective over the workers.

        Raises:
            JobError: The state is from another optimizer.
        """

    def check_state(self, gather: Callable[[Any], list[Any]]) -> bool:
        """Return whether the optimizer itself has state, for example from ``load_state_dict``. Collective.

        Args:
            gather: Returns the values of all workers.

        Raises:
            JobError: The workers have different states; on all workers.
        """
        digests = gather(state_digest(self._optimizer))
        for worker, digest in enumerate(digests):
            if digest != digests[0]:
                raise JobError(
                    f"the state of the optimizer differs between worker {worker} and worker 0: load the same state on "
                    "all ranks",
                    on_all_ranks=True,
                )
        return bool(digests[0])

    def note_step(self) -> None:
        """Tell schedulers that the optimizer takes a step; otherwise they would warn."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def advance_scheduler(self, steps: int) -> None:
        """Call the scheduler's ``step`` until it was called ``steps`` times.

        Raises:
            JobError: The scheduler raises an error, because its schedule has ended.
        """
        while self._scheduler is not None and self._scheduler_steps < steps:
            self._scheduler_steps += 1
            try:
                self._scheduler.step()
            except ValueError as error:
                name = type(self._scheduler).__name__
                raise JobError(f"{name} has no rate after {self._scheduler_steps - 1} steps: {error}") from error

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints, without the slots: the options, and the state of all schedulers."""
        return {
            "given": self._given,
            "groups": self.options,
            "schedulers": [[type(schedule).__name__, schedule.state_dict()] for schedule in self._schedulers()],
            "scheduler_steps": self._scheduler_steps,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``; without schedulers, options that the script has changed are kept.

        Raises:
            CheckpointError: The schedulers of the script have changed.
        """
        schedulers, groups = self._schedulers(), self._optimizer.param_groups
        self._scheduler_steps = state["scheduler_steps"]
        if state["given"] != self._given and not schedulers:
            return
        if state["given"] != self._given:
            _log.info("the options of the optimizer come from the checkpoint, and the schedulers continue them")
        if len(groups) == len(state["groups"]):
            for group, saved in zip(groups, state["groups"], strict=True):
                group.update(saved)
        if [type(schedule).__name__ for schedule in schedulers] != [name for name, _ in state["schedulers"]]:
            raise CheckpointError(
                "the checkpoint and the script have different schedulers of the optimizer; pass --resume "
                "never to start a new run"
            )
        for name, saved in state["schedulers"]:
            # Arguments such as ``step_size`` tell schedulers of one class apart; their order may be another one.
            of_class = [schedule for schedule in schedulers if type(schedule).__name__ == name]
            scheduler = max(of_class, key=partial(_equal_items, saved))
            schedulers.remove(scheduler)
            scheduler.load_state_dict(saved)

    def _schedulers(self) -> list[Any]:
        """Return the schedulers of the optimizer that are not parts of other schedulers.

        A scheduler in a cycle is returned until it is collected.
        """
        living = [schedule for each in list(_living) if (schedule := each()) is not None]
        schedules = [each for each in living if each.__dict__.get("optimizer") is self._optimizer]
        parts = {id(part) for schedule in schedules for part in getattr(schedule, "_schedulers", ())}
        whole = [schedule for schedule in schedules if id(schedule) not in parts]
        return sorted(whole, key=lambda schedule: type(schedule).__name__)


_living = [weakref.ref(each) for each in gc.get_objects() if issubclass(type(each), LRScheduler)]  # schedulers so far


@wraps(LRScheduler.__init__)
def _new_scheduler(kind: type[LRScheduler], *arguments: Any, **options: Any) -> Any:
    """Create and record a scheduler; takes the place of ``__new__``, because not all call the base class's constructor.

    Torch keeps no list, and a search among all objects takes 50 ms.
    """
    new = super(LRScheduler, kind).__new__
    schedule = new(kind) if new is object.__new__ else new(kind, *arguments, **options)
    _living.append(weakref.ref(schedule, _living.remove))
    return schedule


LRScheduler.__new__ = staticmethod(_new_scheduler)  # type: ignore[method-assign, assignment]


class OptimizerInSlots(LiveOptimizer):
    """Tracks an optimizer whose state is in slots of the flat vector."""

    def __init__(self, *arguments: Any, clip_norm: float | None) -> None:
        super().__init__(*arguments)
        self._clip_norm, self._followed = clip_norm, self._without_rates

    @property
    def options(self) -> Options:
        groups = self._optimizer.param_groups
        return [{"lr": float(group["lr"]), **options_of(self._optimizer, group)} for group in groups]

    @property
    def options_of_script(self) -> Options:
        return self.options

    @property
    def _without_rates(self) -> Options:
        return [options_of(self._optimizer, group) for group in self._optimizer.param_groups]

    def has_changed(self) -> bool:
        super().has_changed()
        options = self._without_rates
        if options == self._followed:
            return False
        rule = translated(self._optimizer, self._model, self._rates, self._clip_norm)
        if rule.slots != self.rule.slots:
            raise JobError(
                f"the options of {type(self._optimizer).__name__} were changed so that it needs different "
                f"state: set momentum or amsgrad before making the Trainer"
            )
        self.rule, self._followed = rule, options
        return True

    def set_state(self, loop: HasSlots, gather: Callable[[Any], list[Any]] | None) -> None:
        slots, updates = loop.slots()
        set_state(self._optimizer, self.rule, self._model, loop.plan.layout, slots, updates)

    def drop_state(self) -> None:
        self._optimizer.state.clear()

    def use_state(self, loop: HasSlots) -> None:
        plan = loop.plan
        loop.set_slots(*slots_of(self._optimizer, self.rule, self._model, plan.layout, plan.dtype))
        self.drop_state()


class OptimizerOfTensors(LiveOptimizer):
    """Tracks an optimizer that updates whole tensors; it uses the options that its groups have at each update."""

    rule: TorchTensors

    @property
    def options(self) -> Options:
        return [plain_options(group) for group in self._optimizer.param_groups]

    @property
    def options_of_script(self) -> Options:
        return [
            {name: value for name, value in group.items() if name not in self.rule.changed} for group in self.options
        ]

    def set_state(self, loop: HasSlots, gather: Callable[[Any], list[Any]] | None) -> None:
        if gather is not None:
            for of_worker in gather(self.rule.own_state()):
                for name, state in of_worker.items():
                    self._optimizer.state[self.rule.parameters[name]] = state

    def drop_state(self) -> None:
        self.rule.keep_own_state()

    def use_state(self, loop: HasSlots) -> None:
        self.drop_state()


def live_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    clip_norm: float | None,
    scheduler: Any,
    owner: Owner,
    index: int | None = None,
) -> LiveOptimizer:
    """Return the object that tracks an optimizer.

    Args:
        clip_norm: Maximum Euclidean norm of the whole gradient, or None.
        index: The optimizer's position if there are several optimizers, else None.

    Raises:
        JobError: The optimizer or the scheduler is not supported.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"Trainer got the optimizer {type(optimizer).__name__}: must be an optimizer of torch, a list of them, "
            "or one of mpitrain.optim"
        )
    rates = [GroupRate(optimizer, number) for number in range(len(optimizer.param_groups))]
    rule = translated(optimizer, model, rates, clip_norm, index)
    if isinstance(rule, TorchTensors):
        return OptimizerOfTensors(optimizer, model, rule, rates, scheduler, owner)
    return OptimizerInSlots(optimizer, model, rule, rates, scheduler, owner, clip_norm=clip_norm)


def check_same_options(of_workers: Sequence[Options]) -> None:
    """Check that all workers have the same options.

    Raises:
        JobError: The options of a worker differ from the first worker's; on all workers.
    """
    for worker, options in enumerate(of_workers):
        for index, (first, own) in enumerate(zip(of_workers[0], options, strict=True)):
            names = (name for name, value in first.items() if name in own and own[name] != value)
            if (name := next(names, None)) is not None:
                raise JobError(
                    f"the option {name} of the optimizer's parameter group {index} is {first[name]!r} on worker 0 "
                    f"and {own.get(name)!r} on worker {worker}: set the same on all ranks",
                    on_all_ranks=True,
                )


def _equal_items(saved: dict[str, Any], scheduler: Any) -> int:
    """Return how many items of a state a scheduler has; ``==`` of tensors is a tensor."""
    return sum(repr(saved.get(name)) == repr(value) for name, value in scheduler.state_dict().items())


def _replace_step(optimizer: torch.optim.Optimizer, replacement: Callable[[], None]) -> None:
    """Let ``optimizer.step()`` call a function."""

    def step(_: torch.optim.Optimizer, closure: Any = None) -> None:
        if closure is not None:
            raise JobError("optimizer.step(closure) is not supported: call trainer.backward(loss), and step()")
        replacement()

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else schedulers warn
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # then GradScaler unscales gradients
