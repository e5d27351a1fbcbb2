"""The operations on arrays that ``updater.Updater`` needs, and their implementation on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from ..core.device import CPU
from ..core.kernels import sum_rows
from ..core.layout import Array
from . import compiled
from .compiled import CompiledRule, Constants
from .groups import Group


class Vectors(NamedTuple):
    """The vectors that an update changes, or the same range of each.

    Attributes:
        params, average: ``average`` is empty without moving average.
        slots: By name, in the order of the optimizer's ``slots``.
    """

    params: Array
    average: Array
    slots: dict[str, Array]

    def of_compiled_rules(self) -> tuple[Array, Array, Array, Array]:
        """Return params, two slots and the average, the arguments of compiled rules; unused slots are empty.

        An optimizer with more slots has no compiled rule that uses them; see ``Optimizer.check``.
        """
        slot0, slot1 = [*self.slots.values(), self.params[:0], self.params[:0]][: compiled.SLOTS]
        return self.params, slot0, slot1, self.average

    def part(self, start: int, stop: int) -> Vectors:
        """Return a range of the vectors, as views."""
        part = slice(start, stop)
        return Vectors(self.params[part], self.average[part], {name: slot[part] for name, slot in self.slots.items()})


class Gradient(NamedTuple):
    """A gradient, as the sum of some rows.

    Attributes:
        rows: Shape (n, >= size - origin), C-contiguous.
        order: Shape (m,), int64: indices of the rows to add, in this order.
        origin: Element of the vectors that corresponds to the rows' first element.
        measured: Whether ``measure_segments`` has written the gradient; a factor on the device is applied already.
    """

    rows: Array
    order: Array
    origin: int = 0
    measured: bool = False


class Backend(Protocol):
    """The operations of an update on the vectors of a device.

    Attributes:
        xp: NumPy, or a module with the same interface.
        part: Number of elements to which a rule without a compiled version is applied at a time, unless the rule asks
            for more.
    """

    xp: Any
    part: int

    def copy_of(self, host: Array) -> Array:
        """Return a copy of ``host`` on the device."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return zeros on the device."""

    def update_segments(
        self, rule: CompiledRule, constants: Constants, group: Group, rate: float, gradient: Gradient, ema_weight: float
    ) -> None:
        """Update the vectors with a compiled rule; see ``compiled.CompiledRule.update_segments``.

        Args:
            rate: Factor of the group's ``decay``.
        """

    def measure_segments(
        self, rule: CompiledRule | None, constants: Constants, group: Group, gradient: Gradient, out: Array
    ) -> None:
        """Write the gradient, or the direction of ``rule``, to ``out``; set the group's ``sums``."""

    def sum_rows(self, gradient: Gradient, start: int, stop: int, scale: Any, trained: bool) -> Array:
        """Return ``scale`` times elements [start, stop) of the gradient; the next call may overwrite the result."""

    def number(self, values: Array, index: int) -> Any:
        """Return an element of an array as a factor of vectors, whose type it does not change."""

    def load(self, start: int, stop: int) -> Vectors:
        """Return a range of the vectors to be changed in place; ``store`` must follow."""

    def store(self, part: Vectors, start: int, stop: int) -> None:
        """Store the changes of the range that ``load`` returned."""


class CpuBackend:
    """``Backend`` of the CPU."""

    xp: Any = np
    part = 8 * compiled.BLOCK  # gradient and temporaries stay in the L2 cache

    def __init__(self, vectors: Vectors) -> None:
        self._vectors, self._of_compiled_rules = vectors, vectors.of_compiled_rules()
        self._scratch = CPU.empty((self.part,), vectors.params.dtype)

    def copy_of(self, host: Array) -> Array:
        return host.copy()

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def update_segments(
        self, rule: CompiledRule, constants: Constants, group: Group, rate: float, gradient: Gradient, ema_weight: float
    ) -> None:
        rows, order, origin, _ = gradient
        arguments = constants, group.bounds, group.scales, group.l2, group.decay, rate, rows, order, origin
        rule.update_segments(*arguments, *self._of_compiled_rules, ema_weight, self._scratch)

    def measure_segments(
        self, rule: CompiledRule | None, constants: Constants, group: Group, gradient: Gradient, out: Array
    ) -> None:
        measure = compiled.measure_gradients if rule is None else rule.measure_segments
        segments = group.trust is not None, group.bounds, group.decay
        measure(constants, *segments, *gradient[:2], out, *self._of_compiled_rules[:3], group.sums, self._scratch)

    def sum_rows(self, gradient: Gradient, start: int, stop: int, scale: Any, trained: bool) -> Array:
        rows, order, origin, _ = gradient
        if len(self._scratch) < stop - start:
            self._scratch = CPU.empty((stop - start,), self._scratch.dtype)
        grads = self._scratch[: stop - start]
        sum_rows(rows, order, start - origin, stop - origin, scale, grads)
        return grads

    def number(self, values: Array, index: int) -> Any:
        return float(values[index])

    def load(self, start: int, stop: int) -> Vectors:
        return self._vectors.part(start, stop)

    def store(self, part: Vectors, start: int, stop: int) -> None:
        pass
