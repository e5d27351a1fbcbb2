"""The base class of optimizers: options, slots and an update rule. ``rules`` contains the built-in optimizers.

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
from ..core.words import one_line
from ..errors import JobError
from .compiled import CompiledRule, Constants
from .schedule import EpochCounter, LiveRate, Schedule, as_schedule, by_epoch

Slots = dict[str, Array]


# Options of a whole optimizer, which cannot differ between its groups.
_SHARED = {"clip_norm", "decay_names", "groups", "rate_factors"}


def number(default: float, below: float = math.inf) -> Any:
    """Return a field for a number in [0, below)."""
    return field(default=default, metadata={"below": below})


@dataclass(frozen=True)
class TrustRatio:
    """Scales the step of each parameter by a ratio of norms.

    The factor is ``coefficient * |params| / |direction|``; it is 1 if either norm is 0, so that a parameter that is
    zero can change. The direction includes weight decay. Combined with Adam's rule this is LAMB. Applied before the
    rule of momentum it is LARS. Every other rule can have a trust ratio, too: ``rmsprop(1e-3,
    layer_scaling=TrustRatio())``.

    Attributes:
        coefficient: Factor of all ratios.
        after_rule: Whether the direction is the step of the optimizer's rule, which is then scaled (LAMB). Otherwise
            the direction is the gradient, which is scaled before the rule is applied (LARS), and its norm counts as
            ``|grads| + weight_decay * |params|``.
    """

    coefficient: float = 1.0
    after_rule: bool = True

    def ratios(self, sums: Array, decay: Array, clip: Any) -> tuple[Array, Array]:
        """Return ``(usable, ratios)``, shape (k,): whether both norms differ from 0, and the ratio if they do.

        Args:
            sums: Shape (k, 2): squared norms of each parameter and of its direction before clipping.
            decay: Shape (k,): weight decay.
            clip: Factor that clips the whole gradient to ``clip_norm``.
        """
        params_norm, norm = np.sqrt(sums[:, 0]), np.sqrt(sums[:, 1])
        if not self.after_rule:
            norm = clip * norm + decay * params_norm
        above = self.coefficient * params_norm
        return (above != 0) & (norm != 0), above / (norm + (norm == 0))


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
        l2: L2 penalty: ``l2 * parameter`` is added to the parameter's gradient, after clipping.
        weight_decay: Decoupled weight decay: every step subtracts ``learning_rate * weight_decay * parameter``, in
            addition to the gradient's step (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019).
        decay_names: Patterns, as for file names, of the parameters to which ``l2`` or ``weight_decay`` apply.
        clip_norm: Maximum Euclidean norm of the whole gradient, which is scaled down if necessary.
        rate_factor: Factor of the learning rate, usually a group's factor.
        rate_factors: Short form of groups with a ``rate_factor``: factors by patterns of parameter names. The factor of
            the first pattern that matches is used; it is multiplied by the group's ``rate_factor``.
        groups: Options of parameter groups, by patterns of parameter names; the first pattern that matches is used. The
            optimizer's options apply where a group sets none. An ``l2`` or ``weight_decay`` of a group, unless 0,
            applies to all of its parameters: ``adam(1e-3, groups={"head.*": {"weight_decay": 0.1}})``.
        layer_scaling: Scales the step of each parameter that matches ``decay_names`` by a ratio of norms, or None.
        slots: Names of the vectors that the rule keeps in addition to the parameters; any number, initially zero.
        changes_at_rate_zero: Whether ``update`` may change parameters also at a learning rate of 0. It is then not
            called for parameters whose ``rate_factor`` is 0.
        part: Minimum number of elements for a call of ``update``, if there are that many, because a call is slow.
        trust_ratio: The ratio that scales the steps, or None; a subclass may override it.

    Raises:
        JobError: A value is not valid; the message names it.
    """

    learning_rate: float | Schedule
    l2: float = field(default=0.0, kw_only=True, metadata={"below": math.inf})
    weight_decay: float = field(default=0.0, kw_only=True, metadata={"below": math.inf})
    decay_names: str | Sequence[str] = field(default="*.weight", kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    layer_scaling: TrustRatio | None = field(default=None, kw_only=True)
    rate_factor: float = field(default=1.0, kw_only=True, metadata={"below": math.inf})
    rate_factors: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, kw_only=True)

    slots: ClassVar[tuple[str, ...]] = ()
    changes_at_rate_zero: ClassVar[bool] = False
    part: ClassVar[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "learning_rate", as_schedule(self.learning_rate))
        for option in fields(self):
            value, below = getattr(self, option.name), option.metadata.get("below")
            if below is not None and not (isinstance(value, (int, float)) and 0 <= value < below):
                raise JobError(f"{self.name}: {option.name} is {value!r}, must be a number in [0, {below})")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise JobError(f"{self.name}: clip_norm is {self.clip_norm!r}, must be a number > 0 or None")
        for pattern, factor in self.rate_factors.items():
            if not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
                raise JobError(f"{self.name}: the rate_factor of {pattern!r} is {factor!r}, must be a number >= 0")
        if not isinstance(self.layer_scaling, TrustRatio | None):
            raise JobError(f"{self.name}: layer_scaling is {self.layer_scaling!r}, must be a TrustRatio or None")
        if self.l2 and self.weight_decay:
            raise JobError(
                f"{self.name}: l2={self.l2} and weight_decay={self.weight_decay} cannot be combined; remove one"
            )
        if self.layerwise and self.l2:
            raise JobError(f"{self.name}: l2 is {self.l2}, but {self.name} uses weight_decay; remove l2")
        if self.trust_ratio is not None and self.trust_ratio.after_rule and self.clip_norm is not None:
            raise JobError(
                f"{self.name}: clip_norm is {self.clip_norm}, but {self.name}'s step does not "
                f"depend on the gradient's norm; remove clip_norm"
            )
        self._check_groups()

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def trust_ratio(self) -> TrustRatio | None:
        return self.layer_scaling

    @property
    def layerwise(self) -> bool:
        """Whether the step of each parameter depends on norms of the whole parameter."""
        return self.trust_ratio is not None

    @property
    def needs_sums(self) -> bool:
        """Whether a step depends on norms of whole parameters or of the whole gradient."""
        return self.layerwise or self.clip_norm is not None

    @abstractmethod
    def update(self, params: Array, grads: Array, slots: Slots, rate: float, step: int) -> None:
        """Change ``params`` and the slots in place: the rule's definition.

        The arrays are any part of the flat vectors. An element may depend only on the same element of the other arrays,
        because ranks split the vectors. Arrays are NumPy's or, on a GPU, CuPy's. Use operators and NumPy's element-wise
        functions, such as ``np.sign``. Do not read values, because the host would wait for the GPU.

        Args:
            params: Shape (n,), float32 or float64, already decayed by ``weight_decay``.
            grads: Like ``params``: the gradient, clipped and with the ``l2`` penalty; may be overwritten.
            slots: Arrays like ``params``, by name, also to be changed in place.
            rate: The learning rate at this step.
            step: The 0-based step.
        """

    def fused(self, rate: float, step: int) -> tuple[CompiledRule, Constants] | None:
        """Return a compiled version of ``update``, and its constants; None if there is none."""
        return None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        definer = [next(i for i, c in enumerate(cls.__mro__) if name in vars(c)) for name in ("update", "fused")]
        if definer[0] < definer[1]:  # the inherited compiled version implements another rule
            cls.fused = Optimizer.fused  # type: ignore[method-assign]

    def check(self) -> None:
        """Check the rule, and try it on a few numbers unless it has a compiled version. Local.

        Raises:
            JobError: ``slots`` or ``update`` is not valid; the message states the reason.
        """
        names, update = self.slots, f"{self.name}.update"
        if not isinstance(names, tuple) or not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise JobError(f"{self.name}: slots is {names!r}, must be a tuple of names, such as ('mean',)")
        if len({"params", "average", *names}) < 2 + len(names):
            raise JobError(f"{self.name}: slots is {names!r}, must be different names, none of them params or average")
        if (fused := self.fused(1.0, 0)) is not None:
            if len(fused[0].slots) != len(names):
                raise JobError(f"{self.name}: slots is {names!r}, but its compiled rule has {fused[0].slots!r}")
            return
        whole = np.random.default_rng(0).random((2 + len(names), 7), np.float32)
        split, params_before = whole.copy(), whole[0].copy()
        run: Callable[..., object] = self.update
        for params, grads, *slots in (whole, split[:, :3], split[:, 3:]):
            slots_by_name = dict(zip(names, slots, strict=True))
            try:
                with np.errstate(all="ignore"):
                    for step in (0, 1, 100):
                        returned = run(params, grads, slots_by_name, 0.1, step)
            except Exception as error:
                text = one_line(error)
                raise JobError(f"{update} failed: {type(error).__name__}: {text}") from error
            if returned is not None:
                raise JobError(
                    f"{update} returned {type(returned).__name__}: must change params in place, and return None"
                )
            if [*map(id, slots_by_name.values())] != [*map(id, slots)]:
                raise JobError(f"{update} replaces arrays of slots: change them in place, such as slots['mean'][:] = x")
        if np.array_equal(whole[0], params_before):
            raise JobError(f"{update} does not change params; change it in place: 'p -= x', not 'p = p - x'")
        if not np.allclose(whole, split, equal_nan=True):
            raise JobError(f"{update}: an element's new value must not depend on other elements, such as on a norm")
        if self.trust_ratio is not None and self.trust_ratio.after_rule and self._step_depends_on_params():
            raise JobError(f"{update}: with a trust ratio, the step must not depend on params; use weight_decay")

    def _step_depends_on_params(self) -> bool:
        """Return whether the step of ``update`` differs between random params and params of zeros."""
        values = np.random.default_rng(0).random((2 + len(self.slots), 7))
        at_zero, params_before = values.copy(), values[0].copy()
        at_zero[0] = 0
        for params, grads, *slots in (values, at_zero):
            self.update(params, grads, dict(zip(self.slots, slots, strict=True)), 1.0, 0)
        return not np.allclose(values[0] - params_before, at_zero[0])

    def rate(self, step: int) -> float:
        """Return the learning rate at ``step``."""
        assert callable(self.learning_rate)
        return float(self.learning_rate(step))

    @property
    def live_rates(self) -> list[LiveRate]:
        """The learning rates that a script sets, of all groups; each once."""
        rates = [self.learning_rate, *(options.get("learning_rate") for options in self.groups.values())]
        live: dict[int, Any] = {id(rate): rate for rate in rates if hasattr(rate, "bind")}
        return list(live.values())

    def for_epochs(self, counter: EpochCounter) -> Optimizer:
        """Return this optimizer with ``counter`` set in its schedules, as far as they count epochs."""

        def bound(rate: float | Schedule) -> float | Schedule:
            return replace(rate, counter=counter) if isinstance(rate, by_epoch) else rate

        groups = {
            pattern: {name: bound(value) if name == "learning_rate" else value for name, value in options.items()}
            for pattern, options in self.groups.items()
        }
        return replace(self, learning_rate=bound(self.learning_rate), groups=groups)

    def by_name(self, name: str) -> Optimizer:
        """Return the optimizer of the parameter ``name``, with the options of its group and without groups."""
        patterns = (pattern for pattern in self.groups if fnmatchcase(name, pattern))
        of_group = self._of_group(next(patterns, None))
        factors = (factor for pattern, factor in self.rate_factors.items() if fnmatchcase(name, pattern))
        if not self.rate_factors:
            return of_group
        return replace(of_group, rate_factors={}, rate_factor=of_group.rate_factor * next(factors, 1.0))

    def _of_group(self, pattern: str | None) -> Optimizer:
        options = dict(self.groups[pattern]) if pattern is not None else {}
        if options.get("l2") or options.get("weight_decay"):
            options["decay_names"] = "*"
        return replace(self, groups={}, **options) if self.groups else self

    def _check_groups(self) -> None:
        """Raise JobError if an option of a group does not exist, applies to whole optimizers only, or is not valid."""
        valid = {option.name for option in fields(self) if option.init} - _SHARED
        for pattern, options in self.groups.items():
            where = f"{self.name}: the group {pattern!r}"
            if not isinstance(options, Mapping):
                raise JobError(f"{where} is {options!r}, must be a dict of options")
            for name in set(options) - valid:
                raise JobError(f"{where} has the option {name!r}, must be one of {', '.join(sorted(valid))}")
            try:
                of_group = self._of_group(pattern)
            except JobError as error:
                raise JobError(f"{where}: {error}") from None
            if of_group.layerwise != self.layerwise:
                verb = "enables" if of_group.layerwise else "disables"
                raise JobError(f"{where} {verb} the trust ratio: set it for the whole optimizer, not for a group")

    def check_names(self, names: Sequence[str]) -> None:
        """Check that every group has a parameter; ``names`` are the names of all parameters. Local.

        Raises:
            JobError: A pattern matches no name.
        """
        for pattern in self.groups:
            if not any(fnmatchcase(name, pattern) for name in names):
                shown = ", ".join(names[:8]) + " ..." * (len(names) > 8)
                raise JobError(f"{self.name}: the group {pattern!r} matches no parameter; their names are {shown}")

    def decays(self, name: str) -> bool:
        """Return whether ``decay_names`` matches the parameter ``name``."""
        patterns = [self.decay_names] if isinstance(self.decay_names, str) else self.decay_names
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    def clip_factor(self, squared_norm: Any) -> Any:
        """Return the factor that clips a gradient of this squared norm; NaN or 0 if the norm is not finite.

        Args:
            squared_norm: A number, or an array of shape () on any device.
        """
        if self.clip_norm is None:
            return 1.0
        return self.clip_norm / np.maximum(np.sqrt(squared_norm), self.clip_norm)
