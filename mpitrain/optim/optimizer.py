"""What an optimizer is: numbers, slots and a rule. (What applies it to vectors is the ``Updater``.)

Optimizers are frozen dataclasses, so that they print as they were written; they bear function names, since
job files use them as functions: ``optim.adam(1e-3, clip_norm=1.0)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import ClassVar

import numpy as np

from ..core.layout import Array
from ..errors import JobError
from . import rules
from .rules import Constants
from .schedule import Schedule, as_schedule, by_epoch


@dataclass(frozen=True)
class Optimizer:
    """What all optimizers have in common.

    Attributes:
        learning_rate: A number, or a schedule: a function from the 0-based step to a number.
        l2: This times a parameter is added to its gradient, after clipping.
        weight_decay: A parameter loses learning_rate times this part of itself at every step, beside the
            gradient's step (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019).
        decay_names: Patterns (as of files) of the names of parameters that ``l2`` or ``weight_decay`` act on.
        clip_norm: The gradient, all parameters together, is scaled down to this Euclidean norm at most.
        slots: Names of the vectors that the rule keeps beside the parameters; zeros at first.
        layerwise: The step of each parameter is scaled by a ratio of norms (LAMB, LARS).

    Raises:
        JobError: A number is not valid; the message names it.
    """

    learning_rate: float | Schedule
    l2: float = field(default=0.0, kw_only=True)
    weight_decay: float = field(default=0.0, kw_only=True)
    decay_names: str | Sequence[str] = field(default="*.weight", kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)

    slots: ClassVar[tuple[str, ...]] = ()
    layerwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "learning_rate", as_schedule(self.learning_rate))
        self._check("l2", 0, math.inf)
        self._check("weight_decay", 0, math.inf)
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise JobError(f"{self.name}: clip_norm is {self.clip_norm!r}, and must be a number above 0, or None")
        if self.l2 and self.weight_decay:
            raise JobError(f"{self.name}: l2={self.l2} and weight_decay={self.weight_decay} both decay; give one")

    def _check(self, what: str, low: float, high: float) -> None:
        value = getattr(self, what)
        if not isinstance(value, (int, float)) or not low <= value < high:
            raise JobError(f"{self.name}: {what} is {value!r}, and must be a number in [{low}, {high})")

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def needs_sums(self) -> bool:
        """Whether a step depends on norms of whole parameters or of the whole gradient."""
        return self.layerwise or self.clip_norm is not None

    @property
    def rule(self) -> int:
        """Which arithmetic of ``rules`` updates the parameters."""
        return rules.SGD

    def rate(self, step: int) -> float:
        """The learning rate of ``step``."""
        assert callable(self.learning_rate)
        return float(self.learning_rate(step))

    def for_epochs(self, steps_per_epoch: float) -> Optimizer:
        """This optimizer with its schedule told how long an epoch is, where it counts epochs."""
        if not isinstance(self.learning_rate, by_epoch):
            return self
        return replace(self, learning_rate=replace(self.learning_rate, steps_per_epoch=steps_per_epoch))

    def decays(self, name: str) -> bool:
        """Whether ``decay_names`` match the parameter ``name``."""
        patterns = [self.decay_names] if isinstance(self.decay_names, str) else self.decay_names
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    def constants(self, rate: float, step: int) -> Constants:
        """The numbers of ``rule`` at ``step``."""
        return rate, 0.0, 0.0, 0.0

    def clip_factor(self, squared_norm: float) -> float:
        """What a gradient of this squared norm is multiplied by; NaN or 0 * inf where it is not finite."""
        if self.clip_norm is None:
            return 1.0
        norm = math.sqrt(squared_norm)
        return 1.0 if norm <= self.clip_norm else self.clip_norm / norm

    def direction(self, step: int) -> Constants | None:
        """Adam's numbers, where norms are taken of Adam's direction; None where of the gradient itself."""
        return None

    @property
    def trust_ratio(self) -> tuple[float, float, bool]:
        """(above, below, clipped) of a layerwise optimizer: a parameter's step is multiplied by
        above * |params| / (|gradient| + below * |params|), of the clipped gradient or of the gradient as it is."""
        raise NotImplementedError

    def trust_ratios(self, sums: Array, clip: float) -> Array:
        """What the step of each parameter is multiplied by, shape (k,); of a layerwise optimizer.

        Args:
            sums: Shape (k, 2): squared norms of each parameter and of its gradient or direction before clipping.
            clip: What that is multiplied by, so that the whole gradient is within ``clip_norm``.
        """
        above, below, clipped = self.trust_ratio
        params_norm, norm = np.sqrt(sums[:, 0]), (clip if clipped else 1.0) * np.sqrt(sums[:, 1])
        return _ratios(above * params_norm, norm + below * params_norm)


@dataclass(frozen=True)
class sgd(Optimizer):
    """Stochastic gradient descent: params -= learning_rate * grads."""


@dataclass(frozen=True)
class momentum(Optimizer):
    """velocity = momentum * velocity + grads; params -= learning_rate * velocity.

    With ``nesterov``, params -= learning_rate * (grads + momentum * velocity). Sutskever et al., On the
    importance of initialization and momentum in deep learning, 2013.
    """

    momentum: float = 0.9
    nesterov: bool = False

    slots = ("velocity",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("momentum", 0, 1)

    @property
    def rule(self) -> int:
        return rules.NESTEROV if self.nesterov else rules.MOMENTUM

    def constants(self, rate: float, step: int) -> Constants:
        return rate, self.momentum, 0.0, 0.0


@dataclass(frozen=True)
class nesterov(momentum):
    """``momentum`` with Nesterov's look ahead."""

    nesterov: bool = field(default=True, init=False)


@dataclass(frozen=True)
class adam(Optimizer):
    """Adam: steps scaled by running means of the gradient and of its square, both corrected for bias.

    Kingma and Ba, Adam, 2015, algorithm 1, in the order of operations that section 2 recommends, with
    ``eps`` where the algorithm has it.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    slots = ("mean", "square")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("beta1", 0, 1)
        self._check("beta2", 0, 1)
        self._check("eps", 0, math.inf)

    @property
    def rule(self) -> int:
        return rules.ADAM

    def constants(self, rate: float, step: int) -> Constants:
        correction1 = 1 - self.beta1 ** (step + 1)
        correction2 = math.sqrt(1 - self.beta2 ** (step + 1))
        return rate * correction2 / correction1, self.beta1, self.beta2, self.eps * correction2


@dataclass(frozen=True)
class adamw(adam):
    """Adam with decoupled weight decay. Loshchilov and Hutter, 2019, algorithm 2."""

    weight_decay: float = field(default=0.01, kw_only=True)


@dataclass(frozen=True)
class adagrad(Optimizer):
    """params -= learning_rate * grads / (sqrt(sum of all squared grads) + eps).

    Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011.
    """

    eps: float = 1e-10

    slots = ("total",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("eps", 0, math.inf)

    @property
    def rule(self) -> int:
        return rules.ADAGRAD

    def constants(self, rate: float, step: int) -> Constants:
        return rate, self.eps, 0.0, 0.0


@dataclass(frozen=True)
class rmsprop(Optimizer):
    """params -= learning_rate * grads / (sqrt(running mean of squared grads) + eps).

    Tieleman and Hinton, COURSERA: Neural Networks for Machine Learning, lecture 6.5, 2012.
    """

    decay: float = 0.99
    eps: float = 1e-8

    slots = ("square",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("decay", 0, 1)
        self._check("eps", 0, math.inf)

    @property
    def rule(self) -> int:
        return rules.RMSPROP

    def constants(self, rate: float, step: int) -> Constants:
        return rate, self.decay, self.eps, 0.0


@dataclass(frozen=True)
class lamb(adam):
    """Adam whose step of each parameter has the length learning_rate * that parameter's norm.

    Only parameters that ``decay_names`` match are scaled so and decayed: biases and the scales of
    normalization take Adam's step. There is no ``clip_norm``: the steps' lengths do not depend on the
    gradient's. You et al., Large Batch Optimization for Deep Learning, 2020, algorithm 2.
    """

    weight_decay: float = field(default=0.01, kw_only=True)

    layerwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.l2:
            raise JobError(f"lamb: l2 is {self.l2}, but lamb decays by weight_decay; leave l2 out")
        if self.clip_norm is not None:
            raise JobError(
                f"lamb: clip_norm is {self.clip_norm}, but lamb steps have lengths of their own; leave it out"
            )

    @property
    def rule(self) -> int:
        return rules.SGD  # moves along the direction that the norms were taken of

    def constants(self, rate: float, step: int) -> Constants:
        return rate, 0.0, 0.0, 0.0

    def direction(self, step: int) -> Constants:
        return super().constants(1.0, step)

    @property
    def trust_ratio(self) -> tuple[float, float, bool]:
        return 1.0, 0.0, False


@dataclass(frozen=True)
class lars(Optimizer):
    """Momentum whose step of each parameter has the length learning_rate * trust * that parameter's norm.

    velocity = momentum * velocity + learning_rate * ratio * (grads + weight_decay * params), where ratio is
    trust * |params| / (|grads| + weight_decay * |params|); params -= velocity. Only parameters that
    ``decay_names`` match are scaled so and decayed; for the others the ratio is 1. You, Gitman and Ginsburg,
    Large Batch Training of Convolutional Networks, 2017, algorithm 1.
    """

    momentum: float = 0.9
    trust: float = 0.001

    slots = ("velocity",)
    layerwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("momentum", 0, 1)
        self._check("trust", 0, math.inf)
        if self.l2:
            raise JobError(f"lars: l2 is {self.l2}, but lars decays by weight_decay; leave l2 out")

    @property
    def rule(self) -> int:
        return rules.MOMENTUM

    def constants(self, rate: float, step: int) -> Constants:
        return rate, self.momentum, 0.0, 0.0

    @property
    def trust_ratio(self) -> tuple[float, float, bool]:
        return self.trust, self.weight_decay, True


def _ratios(above: Array, below: Array) -> Array:
    """above / below, and 1 where either is 0: a parameter that is all zeros must be able to leave zero."""
    usable = (above != 0) & (below != 0)
    return np.divide(above, below, out=np.ones_like(above), where=usable)
