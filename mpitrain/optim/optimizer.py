"""Optimizers: hyperparameters, slots and an update rule. ``Updater`` applies them to vectors.

Optimizers are frozen dataclasses, so that they print as they were written. They have lower-case names because job files
use them like functions: ``optim.adam(1e-3, clip_norm=1.0)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import numpy as np

from ..core.layout import Array
from ..errors import JobError
from . import rules
from .rules import Constants
from .schedule import Schedule, as_schedule, by_epoch

Slots = dict[str, Array]


def _number(default: float, below: float = math.inf) -> Any:
    """Return a field for a number in [0, below)."""
    return field(default=default, metadata={"below": below})


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base class of optimizers. A subclass defines hyperparameters, the names of its slots, and ``update``::

        @dataclass(frozen=True)
        class heavy_ball(Optimizer):
            friction: float = 0.1
            slots = ("velocity",)
            def update(self, params, grads, slots, rate, step):
                velocity = slots["velocity"]
                velocity *= 1 - self.friction
                velocity += grads
                params -= rate * velocity

    ``Updater`` does the rest: it sums and clips gradients, decays parameters and maintains moving averages.

    Attributes:
        learning_rate: A number, or a schedule: a function from the 0-based step to a number.
        l2: L2 penalty: this times a parameter is added to its gradient, after clipping.
        weight_decay: Decoupled weight decay: every step subtracts learning_rate times this times the parameter, in
            addition to the gradient's step (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019).
        decay_names: Patterns (as of files) of the names of parameters to which ``l2`` or ``weight_decay`` apply.
        clip_norm: Maximum Euclidean norm of the whole gradient, which is scaled down if necessary.
        rate_factors: Factors of the learning rate by patterns (as of files) of the names of parameters; the first
            pattern that matches counts. Other parameters have the factor 1.
        slots: Names of the vectors that the rule keeps in addition to the parameters; any number, initially zero.
        layerwise: Whether the step of each parameter is scaled by a ratio of norms (LAMB, LARS).

    Raises:
        JobError: A value is not valid; the message names it.
    """

    learning_rate: float | Schedule
    l2: float = field(default=0.0, kw_only=True, metadata={"below": math.inf})
    weight_decay: float = field(default=0.0, kw_only=True, metadata={"below": math.inf})
    decay_names: str | Sequence[str] = field(default="*.weight", kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    rate_factors: Mapping[str, float] = field(default_factory=dict, kw_only=True)

    slots: ClassVar[tuple[str, ...]] = ()
    layerwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "learning_rate", as_schedule(self.learning_rate))
        for each in fields(self):
            value, below = getattr(self, each.name), each.metadata.get("below")
            if below is not None and not (isinstance(value, (int, float)) and 0 <= value < below):
                raise JobError(f"{self.name}: {each.name} is {value!r}, must be a number in [0, {below})")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise JobError(f"{self.name}: clip_norm is {self.clip_norm!r}, must be a number > 0 or None")
        for pattern, factor in self.rate_factors.items():
            if not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
                raise JobError(f"{self.name}: the rate_factor of {pattern!r} is {factor!r}, must be a number >= 0")
        if self.l2 and self.weight_decay:
            raise JobError(
                f"{self.name}: l2={self.l2} and weight_decay={self.weight_decay} cannot be combined; remove one"
            )

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def needs_sums(self) -> bool:
        """Whether a step depends on norms of whole parameters or of the whole gradient."""
        return self.layerwise or self.clip_norm is not None

    @abstractmethod
    def update(self, params: Array, grads: Array, slots: Slots, rate: float, step: int) -> None:
        """Change ``params`` and the slots in place: the rule's definition.

        The arrays are any part of the flat vectors. An element may depend only on the same element of the other arrays,
        because ranks split the vectors. Arrays are NumPy's or, on a GPU, CuPy's: use operators and NumPy's element-wise
        functions, such as ``np.sign``, and do not read values, for which a GPU would have to wait.

        Args:
            params: Shape (n,), float32 or float64, already decayed by ``weight_decay``.
            grads: Like ``params``: the gradient, clipped and with the ``l2`` penalty; may be overwritten.
            slots: Arrays like ``params``, by name, also to be changed in place.
            rate: The learning rate at this step.
            step: The 0-based step.
        """

    def fused(self, rate: float, step: int) -> tuple[int, Constants] | None:
        """Return the number in ``rules`` of a compiled version of ``update``, and its constants; None without one."""
        return None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        definer = [next(i for i, c in enumerate(cls.__mro__) if name in vars(c)) for name in ("update", "fused")]
        if definer[0] < definer[1]:  # the inherited compiled version is one of another rule
            cls.fused = Optimizer.fused  # type: ignore[method-assign]

    def check(self) -> None:
        """Check the rule, and try it on a few numbers unless it has a compiled version. Local.

        Raises:
            JobError: ``slots`` are not valid names, or ``update`` raises an exception, returns a value, does not change
                ``params``, or computes something else if the vectors are split.
        """
        names, update = self.slots, f"{self.name}.update"
        if not isinstance(names, tuple) or not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise JobError(f"{self.name}: slots is {names!r}, must be a tuple of names, such as ('mean',)")
        if len({"params", "average", *names}) < 2 + len(names):
            raise JobError(f"{self.name}: slots is {names!r}, must be different names, none of them params or average")
        if self.fused(1.0, 0) is not None:
            return
        if self.layerwise:
            raise JobError(f"{update}: the rule of a layerwise optimizer cannot be replaced; derive from Optimizer")
        whole = np.random.default_rng(0).random((2 + len(names), 7), np.float32)
        split, params_before = whole.copy(), whole[0].copy()
        run: Callable[..., object] = self.update
        for params, grads, *slots in (whole, split[:, :3], split[:, 3:]):
            given = dict(zip(names, slots, strict=True))
            try:
                with np.errstate(all="ignore"):
                    for step in (0, 1, 100):
                        returned = run(params, grads, given, 0.1, step)
            except Exception as error:
                text = " ".join(str(error).split())
                raise JobError(f"{update} failed: {type(error).__name__}: {text}") from error
            if returned is not None or [*map(id, given.values())] != [*map(id, slots)]:
                raise JobError(f"{update} must change params and the arrays of slots in place, and return nothing")
        if np.array_equal(whole[0], params_before):
            raise JobError(f"{update} does not change params; change it in place: 'p -= x', not 'p = p - x'")
        if not np.allclose(whole, split, equal_nan=True):
            raise JobError(f"{update}: an element's new value must not depend on other elements, such as on a norm")

    def rate(self, step: int) -> float:
        """Return the learning rate at ``step``."""
        assert callable(self.learning_rate)
        return float(self.learning_rate(step))

    def for_epochs(self, steps_per_epoch: float) -> Optimizer:
        """Return this optimizer with the length of an epoch set in its schedule, if the schedule counts epochs."""
        if not isinstance(self.learning_rate, by_epoch):
            return self
        return replace(self, learning_rate=replace(self.learning_rate, steps_per_epoch=steps_per_epoch))

    def decays(self, name: str) -> bool:
        """Whether ``decay_names`` matches the parameter ``name``."""
        patterns = [self.decay_names] if isinstance(self.decay_names, str) else self.decay_names
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    def rate_factor(self, name: str) -> float:
        """Return the factor of the learning rate of the parameter ``name``."""
        factors = (factor for pattern, factor in self.rate_factors.items() if fnmatchcase(name, pattern))
        return next(factors, 1.0)

    def clip_factor(self, squared_norm: float) -> float:
        """Return the factor that clips a gradient of this squared norm; NaN or 0 * inf if it is not finite."""
        if self.clip_norm is None:
            return 1.0
        norm = math.sqrt(squared_norm)
        return 1.0 if norm <= self.clip_norm else self.clip_norm / norm

    def direction(self, step: int) -> Constants | None:
        """Return Adam's constants if norms are taken of Adam's direction; None if of the gradient itself."""
        return None

    @property
    def trust_ratio(self) -> tuple[float, float, bool]:
        """The constants ``(above, below, clipped)`` of a layerwise optimizer.

        A parameter's step is multiplied by ``above * |params| / (|gradient| + below * |params|)``, with the clipped
        gradient or the original one.
        """
        raise NotImplementedError

    def trust_ratios(self, sums: Array, clip: float) -> Array:
        """Return the factor of each parameter's step, shape (k,); for layerwise optimizers only.

        Args:
            sums: Shape (k, 2): squared norms of each parameter and of its gradient or direction before clipping.
            clip: Factor that clips the whole gradient to ``clip_norm``.
        """
        above, below, clipped = self.trust_ratio
        params_norm, norm = np.sqrt(sums[:, 0]), (clip if clipped else 1.0) * np.sqrt(sums[:, 1])
        return _ratios(above * params_norm, norm + below * params_norm)


@dataclass(frozen=True)
class sgd(Optimizer):
    """Stochastic gradient descent: ``params -= learning_rate * grads``."""

    def update(self, params: Array, grads: Array, slots: Slots, rate: float, step: int) -> None:
        params -= rate * grads

    def fused(self, rate: float, step: int) -> tuple[int, Constants]:
        return rules.SGD, (rate, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class momentum(Optimizer):
    """Gradient descent with momentum: ``velocity = momentum * velocity + grads; params -= learning_rate * velocity``.

    With ``nesterov``, ``params -= learning_rate * (grads + momentum * velocity)``. Sutskever et al., On the
    importance of initialization and momentum in deep learning, 2013.
    """

    momentum: float = _number(0.9, below=1)
    nesterov: bool = False

    slots = ("velocity",)

    def update(self, params: Array, grads: Array, slots: Slots, rate: float, step: int) -> None:
        velocity = slots["velocity"]
        velocity *= self.momentum
        velocity += grads
        params -= rate * (grads + self.momentum * velocity if self.nesterov else velocity)

    def fused(self, rate: float, step: int) -> tuple[int, Constants]:
        return rules.NESTEROV if self.nesterov else rules.MOMENTUM, (rate, self.momentum, 0.0, 0.0)


@dataclass(frozen=True)
class nesterov(momentum):
    """``momentum`` with Nesterov's lookahead."""

    nesterov: bool = field(default=True, init=False)


@dataclass(frozen=True)
class adam(Optimizer):
    """Adam: steps scaled by running means of the gradient and of its square, both bias-corrected.

    Kingma and Ba, Adam, 2015, algorithm 1, in the order of operations recommended in section 2, with ``eps`` as in the
    algorithm.
    """

    beta1: float = _number(0.9, below=1)
    beta2: float = _number(0.999, below=1)
    eps: float = _number(1e-8)

    slots = ("mean", "square")

    def update(self, params: Array, grads: Array, slots: Slots, rate: float, step: int) -> None:
        mean, square = slots["mean"], slots["square"]
        mean *= self.beta1
        mean += (1 - self.beta1) * grads
        square *= self.beta2
        square += (1 - self.beta2) * (grads * grads)
        rate, _, _, eps = self._constants(rate, step)
        params -= rate * mean / (np.sqrt(square) + eps)

    def fused(self, rate: float, step: int) -> tuple[int, Constants]:
        return rules.ADAM, self._constants(rate, step)

    def _constants(self, rate: float, step: int) -> Constants:
        correction1 = 1 - self.beta1 ** (step + 1)
        correction2 = math.sqrt(1 - self.beta2 ** (step + 1))
        return rate * correction2 / correction1, self.beta1, self.beta2, self.eps * correction2


@dataclass(frozen=True)
class adamw(adam):
    """Adam with decoupled weight decay. Loshchilov and Hutter, 2019, algorithm 2."""

    weight_decay: float = field(default=0.01, kw_only=True, metadata={"below": math.inf})


@dataclass(frozen=True)
class adagrad(Optimizer):
    """Adagrad: ``params -= learning_rate * grads / (sqrt(sum of all squared grads) + eps)``.

    Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011.
    """

    eps: float = _number(1e-10)

    slots = ("total",)

    def update(self, params: Array, grads: Array, slots: Slots, rate: float, step: int) -> None:
        total = slots["total"]
        total += grads * grads
        params -= rate * grads / (np.sqrt(total) + self.eps)

    def fused(self, rate: float, step: int) -> tuple[int, Constants]:
        return rules.ADAGRAD, (rate, self.eps, 0.0, 0.0)


@dataclass(frozen=True)
class rmsprop(Optimizer):
    """RMSProp: ``params -= learning_rate * grads / (sqrt(running mean of squared grads) + eps)``.

    Tieleman and Hinton, COURSERA: Neural Networks for Machine Learning, lecture 6.5, 2012.
    """

    decay: float = _number(0.99, below=1)
    eps: float = _number(1e-8)

    slots = ("square",)

    def update(self, params: Array, grads: Array, slots: Slots, rate: float, step: int) -> None:
        square = slots["square"]
        square *= self.decay
        square += (1 - self.decay) * (grads * grads)
        params -= rate * grads / (np.sqrt(square) + self.eps)

    def fused(self, rate: float, step: int) -> tuple[int, Constants]:
        return rules.RMSPROP, (rate, self.decay, self.eps, 0.0)


@dataclass(frozen=True)
class lamb(adam):
    """Adam in which each parameter's step has the length ``learning_rate`` times the parameter's norm.

    Only parameters that match ``decay_names`` are scaled and decayed; biases and normalization scales take Adam's step.
    ``clip_norm`` is not available, because the length of a step does not depend on the gradient's length. You et al.,
    Large Batch Optimization for Deep Learning, 2020, algorithm 2.
    """

    weight_decay: float = field(default=0.01, kw_only=True, metadata={"below": math.inf})

    layerwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.l2:
            raise JobError(f"lamb: l2 is {self.l2}, but lamb uses weight_decay; remove l2")
        if self.clip_norm is not None:
            raise JobError(
                f"lamb: clip_norm is {self.clip_norm}, but lamb's step length ignores the gradient's; remove clip_norm"
            )

    def fused(self, rate: float, step: int) -> tuple[int, Constants]:
        return rules.SGD, (rate, 0.0, 0.0, 0.0)  # a step along the direction that was measured

    def direction(self, step: int) -> Constants:
        return self._constants(1.0, step)

    @property
    def trust_ratio(self) -> tuple[float, float, bool]:
        return 1.0, 0.0, False


@dataclass(frozen=True)
class lars(momentum):
    """Momentum in which each parameter's step has the length ``learning_rate * trust`` times the parameter's norm.

    ``velocity = momentum * velocity + learning_rate * ratio * (grads + weight_decay * params)``, where ``ratio`` is
    ``trust * |params| / (|grads| + weight_decay * |params|)``; ``params -= velocity``. Only parameters that match
    ``decay_names`` are scaled and decayed; for the others the ratio is 1. You, Gitman and Ginsburg, Large Batch
    Training of Convolutional Networks, 2017, algorithm 1.
    """

    nesterov: bool = field(default=False, init=False, repr=False)
    trust: float = _number(0.001)

    layerwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.l2:
            raise JobError(f"lars: l2 is {self.l2}, but lars uses weight_decay; remove l2")

    @property
    def trust_ratio(self) -> tuple[float, float, bool]:
        return self.trust, self.weight_decay, True


def _ratios(above: Array, below: Array) -> Array:
    """Return above / below, or 1 where either is 0, so that a parameter that is zero can change."""
    usable = (above != 0) & (below != 0)
    return np.divide(above, below, out=np.ones_like(above), where=usable)
