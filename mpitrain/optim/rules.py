"""The optimizers of the package: options, slots, and the text of the rule, from which the kernels are made.

The constants in the text are those that ``compiled`` returns. A rule has at most two slots, six constants, and the
operations of ``CompiledRule.text``. An optimizer that needs more defines ``update`` alone, as those of users do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..core.layout import Array
from .compiled import CompiledRule, Constants
from .optimizer import Optimizer, Slots, TrustRatio, number

__all__ = ["adagrad", "adam", "adamw", "lamb", "lars", "momentum", "nesterov", "rmsprop", "sgd"]


class _Compiled(Optimizer):
    """An optimizer that is defined by a compiled rule, whose text is also its definition for whole arrays."""

    def compiled(self, rate: float, step: int) -> tuple[CompiledRule, Constants]:
        """Return the rule and its constants."""
        raise NotImplementedError

    def fused(self, rate: float, step: int) -> tuple[CompiledRule, Constants]:
        return self.compiled(rate, step)

    def update(self, params: Array, grads: Array, slots: Slots, rate: float, step: int) -> None:
        rule, constants = self.compiled(rate, step)
        rule.apply(params, grads, slots, constants)


_SGD = CompiledRule("sgd", ("rate",), (), "p -= rate * g;")


@dataclass(frozen=True)
class sgd(_Compiled):
    """Stochastic gradient descent: ``params -= learning_rate * grads``."""

    def compiled(self, rate: float, step: int) -> tuple[CompiledRule, Constants]:
        return _SGD, (rate,)


_MOMENTUM = CompiledRule(
    "momentum", ("rate", "momentum"), ("velocity",), "velocity = momentum * velocity + g; p -= rate * velocity;"
)
_NESTEROV = CompiledRule(
    "nesterov",
    ("rate", "momentum"),
    ("velocity",),
    "velocity = momentum * velocity + g; p -= rate * (g + momentum * velocity);",
)


@dataclass(frozen=True)
class momentum(_Compiled):
    """Gradient descent with momentum: ``velocity = momentum * velocity + grads; params -= learning_rate * velocity``.

    With ``nesterov``, ``params -= learning_rate * (grads + momentum * velocity)``. Sutskever et al., On the
    importance of initialization and momentum in deep learning, 2013.
    """

    momentum: float = number(0.9, below=1)
    nesterov: bool = False

    slots = ("velocity",)

    def compiled(self, rate: float, step: int) -> tuple[CompiledRule, Constants]:
        return _NESTEROV if self.nesterov else _MOMENTUM, (rate, self.momentum)


@dataclass(frozen=True)
class nesterov(momentum):
    """``momentum`` with Nesterov's lookahead."""

    nesterov: bool = field(default=True, init=False)


_ADAM = CompiledRule(
    "adam",
    ("rate", "keep1", "take1", "keep2", "take2", "eps"),
    ("m", "v"),
    "m = keep1 * m + take1 * g; v = keep2 * v + take2 * (g * g); p -= rate * m / (sqrt(v) + eps);",
)


@dataclass(frozen=True)
class adam(_Compiled):
    """Adam: steps scaled by running means of the gradient and of its square, both bias-corrected.

    Kingma and Ba, Adam, 2015, algorithm 1, in the order of operations recommended in section 2, with ``eps`` as in the
    algorithm.
    """

    beta1: float = number(0.9, below=1)
    beta2: float = number(0.999, below=1)
    eps: float = number(1e-8)

    slots = ("mean", "square")

    def compiled(self, rate: float, step: int) -> tuple[CompiledRule, Constants]:
        rate, eps = self._corrected(rate, step)
        return _ADAM, (rate, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, eps)

    def _corrected(self, rate: float, step: int) -> tuple[float, float]:
        """Return the rate and ``eps`` that include the bias corrections."""
        correction1 = 1 - self.beta1 ** (step + 1)
        correction2 = math.sqrt(1 - self.beta2 ** (step + 1))
        return rate * correction2 / correction1, self.eps * correction2


@dataclass(frozen=True)
class adamw(adam):
    """Adam with decoupled weight decay. Loshchilov and Hutter, 2019, algorithm 2."""

    weight_decay: float = field(default=0.01, kw_only=True, metadata={"below": math.inf})


_ADAGRAD = CompiledRule("adagrad", ("rate", "eps"), ("total",), "total += g * g; p -= rate * g / (sqrt(total) + eps);")


@dataclass(frozen=True)
class adagrad(_Compiled):
    """Adagrad: ``params -= learning_rate * grads / (sqrt(sum of all squared grads) + eps)``.

    Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011.
    """

    eps: float = number(1e-10)

    slots = ("total",)

    def compiled(self, rate: float, step: int) -> tuple[CompiledRule, Constants]:
        return _ADAGRAD, (rate, self.eps)


_RMSPROP = CompiledRule(
    "rmsprop",
    ("rate", "keep", "take", "eps"),
    ("square",),
    "square = keep * square + take * (g * g); p -= rate * g / (sqrt(square) + eps);",
)


@dataclass(frozen=True)
class rmsprop(_Compiled):
    """RMSProp: ``params -= learning_rate * grads / (sqrt(running mean of squared grads) + eps)``.

    Tieleman and Hinton, COURSERA: Neural Networks for Machine Learning, lecture 6.5, 2012.
    """

    decay: float = number(0.99, below=1)
    eps: float = number(1e-8)

    slots = ("square",)

    def compiled(self, rate: float, step: int) -> tuple[CompiledRule, Constants]:
        return _RMSPROP, (rate, self.decay, 1 - self.decay, self.eps)


@dataclass(frozen=True)
class lamb(adam):
    """Adam in which each parameter's step has the length ``learning_rate`` times the parameter's norm.

    Only parameters that match ``decay_names`` are scaled and decayed; biases and normalization scales take Adam's step.
    ``clip_norm`` is not available, because the length of a step does not depend on the gradient's length. You et al.,
    Large Batch Optimization for Deep Learning, 2020, algorithm 2.
    """

    weight_decay: float = field(default=0.01, kw_only=True, metadata={"below": math.inf})
    layer_scaling: TrustRatio | None = field(default=TrustRatio(), kw_only=True)


@dataclass(frozen=True)
class lars(momentum):
    """Momentum in which each parameter's gradient is scaled to a norm of about ``trust`` times the parameter's norm.

    ``velocity = momentum * velocity + learning_rate * ratio * (grads + weight_decay * params)``, where ``ratio`` is
    ``trust * |params| / (|grads| + weight_decay * |params|)``; ``params -= velocity``. Only parameters that match
    ``decay_names`` are scaled and decayed; for the others the ratio is 1. You, Gitman and Ginsburg, Large Batch
    Training of Convolutional Networks, 2017, algorithm 1.
    """

    nesterov: bool = field(default=False, init=False, repr=False)
    trust: float = number(0.001)
    layer_scaling: TrustRatio | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_scaling", TrustRatio(self.trust, after_rule=False))
        super().__post_init__()
