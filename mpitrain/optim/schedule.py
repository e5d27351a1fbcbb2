"""Learning rates as functions of the step.

A schedule is any function from the 0-based step to a learning rate. The schedules of this module are frozen
dataclasses, so that they print as they were written. Their names are lower-case, because they are used like functions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from ..core.layout import Array
from ..errors import JobError

#: A function from the 0-based step to the learning rate.
Schedule = Callable[[int], float]


def as_schedule(value: float | Schedule) -> Schedule:
    """Return ``value`` if it is a schedule, else a constant schedule.

    Raises:
        JobError: ``value`` is neither a schedule nor a finite number >= 0.
    """
    if callable(value):
        return value
    if not (_is_number(value) and 0 <= value < math.inf):
        raise JobError(f"the learning rate is {value!r}, must be a finite number >= 0 or a schedule")
    return constant(value)


class LiveRate(Protocol):
    """A learning rate that a script changes during training; a call returns the current value."""

    def __call__(self, step: int) -> float: ...

    def as_set(self) -> float:
        """Return the value that the script of this process has set."""

    def bind(self, values: Array, index: int) -> None:
        """Return ``values[index]`` from now on: with parameter servers, the value of the chief."""


@dataclass(frozen=True)
class constant:
    """The same learning rate at every step."""

    value: float

    def __post_init__(self) -> None:
        _check_rate("constant", "value", self.value)

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class exponential:
    """``initial * decay_rate ** (step / decay_steps)``; with ``staircase`` the exponent is rounded down."""

    initial: float
    decay_rate: float
    decay_steps: int
    staircase: bool = False

    def __post_init__(self) -> None:
        _check_rate("exponential", "initial", self.initial)
        _check_rate("exponential", "decay_rate", self.decay_rate)
        _check_steps("exponential", "decay_steps", self.decay_steps)

    def __call__(self, step: int) -> float:
        exponent = step // self.decay_steps if self.staircase else step / self.decay_steps
        return self.initial * float(self.decay_rate**exponent)


@dataclass(frozen=True)
class piecewise:
    """``values[0]`` before step ``boundaries[0]``, and ``values[i]`` from step ``boundaries[i - 1]``."""

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        _check_boundaries("piecewise", self.boundaries, "values", len(self.values))
        for value in self.values:
            _check_rate("piecewise", "values", value)

    def __call__(self, step: int) -> float:
        return self.values[bisect_right(self.boundaries, step)]


@dataclass(frozen=True)
class cosine:
    """Half a cosine from ``initial`` down to ``final`` at ``decay_steps``, then ``final``.

    Loshchilov and Hutter, SGDR, 2017, eq. 5, without restarts.
    """

    initial: float
    decay_steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_rate("cosine", "initial", self.initial)
        _check_rate("cosine", "final", self.final)
        _check_steps("cosine", "decay_steps", self.decay_steps)

    def __call__(self, step: int) -> float:
        done = min(step / self.decay_steps, 1.0)
        return self.final + (self.initial - self.final) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class polynomial:
    """``(initial - final) * (1 - step / decay_steps) ** power + final`` until ``decay_steps``, then ``final``."""

    initial: float
    decay_steps: int
    final: float = 0.0
    power: float = 1.0

    def __post_init__(self) -> None:
        _check_rate("polynomial", "initial", self.initial)
        _check_rate("polynomial", "final", self.final)
        _check_steps("polynomial", "decay_steps", self.decay_steps)
        if not (_is_number(self.power) and 0 < self.power < math.inf):
            raise JobError(f"polynomial: power is {self.power!r}, must be a finite number > 0")

    def __call__(self, step: int) -> float:
        left = 1 - min(step / self.decay_steps, 1.0)
        return self.final + (self.initial - self.final) * float(left**self.power)


@dataclass(frozen=True)
class warm_up:
    """A linear increase up to ``then(0)`` at step ``steps - 1``, followed by ``then`` from step ``steps``.

    ``then`` counts steps from the end of the warm-up. Goyal et al., Accurate, Large Minibatch SGD,
    2017, section 2.2.
    """

    steps: int
    then: float | Schedule

    def __post_init__(self) -> None:
        _check_steps("warm_up", "steps", self.steps)
        object.__setattr__(self, "then", as_schedule(self.then))

    def __call__(self, step: float, step_size: float = 1) -> float:
        assert callable(self.then)
        if step < self.steps:
            return _value(self.then, 0, step_size) * min(step + step_size, self.steps) / self.steps
        return _value(self.then, step - self.steps, step_size)


@dataclass(frozen=True)
class join:
    """``schedules[0]`` before step ``boundaries[0]``, and ``schedules[i]`` from step ``boundaries[i - 1]``.

    Each schedule counts steps from its own start.
    """

    boundaries: Sequence[int]
    schedules: Sequence[float | Schedule]

    def __post_init__(self) -> None:
        _check_boundaries("join", self.boundaries, "schedules", len(self.schedules))
        object.__setattr__(self, "schedules", tuple(as_schedule(s) for s in self.schedules))

    def __call__(self, step: float, step_size: float = 1) -> float:
        index = bisect_right(self.boundaries, step)
        current = self.schedules[index]
        assert callable(current)
        return _value(current, step - self.boundaries[index - 1] if index else step, step_size)


@dataclass(eq=False)
class EpochCounter:
    """Counts the epochs of a run.

    Attributes:
        examples: Number of examples in an epoch.
        step_examples: Number of examples in a step.
        start: A step and the number of examples before it; steps before the last start may have had other batches.
    """

    examples: int
    step_examples: int
    start: tuple[int, int] = (0, 0)

    def at(self, step: int) -> float:
        """Return the number of epochs before a step."""
        start, examples = self.start
        return max(0, examples + (step - start) * self.step_examples) / self.examples

    def steps_until(self, epochs: int) -> int:
        """Return the number of steps after which this number of epochs is complete; at least the start's."""
        start, examples = self.start
        return start + math.ceil(max(0, epochs * self.examples - examples) / self.step_examples)


@dataclass(frozen=True)
class by_epoch:
    """A schedule that counts epochs, as fractions, instead of steps.

    It continues at the same epoch if a run resumes with other batches, for example on another number of ranks. (In
    ``backup``, it counts the steps with the present batches.) It must not be part of another schedule; ``counter`` is
    set when the run starts.
    """

    schedule: Callable[[float], float]
    counter: EpochCounter | None = field(default=None, repr=False)

    def __call__(self, step: int) -> float:
        counter = self.counter
        if counter is None:
            raise JobError("by_epoch works only in an optimizer of a run; put other schedules inside of by_epoch")
        return _value(self.schedule, counter.at(step), counter.step_examples / counter.examples)


def _value(schedule: Callable[..., float], step: float, step_size: float) -> float:
    """Return the value of ``schedule``; warm-ups need the size of a step, which is less than 1 if they count epochs."""
    return schedule(step, step_size) if isinstance(schedule, (warm_up, join)) else schedule(step)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_rate(where: str, what: str, value: float) -> None:
    if not (_is_number(value) and 0 <= value < math.inf):
        raise JobError(f"{where}: {what} is {value!r}, must be a finite number >= 0")


def _check_steps(where: str, what: str, steps: int) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise JobError(f"{where}: {what} is {steps!r}, must be an integer >= 1")


def _check_boundaries(where: str, boundaries: Sequence[int], what: str, count: int) -> None:
    for boundary in boundaries:
        _check_steps(where, "boundaries", boundary)
    if any(a >= b for a, b in pairwise(boundaries)):
        raise JobError(f"{where}: boundaries are {list(boundaries)}, must be strictly increasing")
    if count != len(boundaries) + 1:
        raise JobError(
            f"{where}: got {count} {what} for {len(boundaries)} boundaries; the number of {what} must be "
            f"{len(boundaries) + 1}, one more than the number of boundaries"
        )
