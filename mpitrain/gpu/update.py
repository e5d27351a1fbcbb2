"""The operations of ``optim.backend`` on a GPU: kernels that depend on each other's results; the host does not wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.layout import Array, Layout
from ..optim.average import moving_average
from ..optim.backend import Gradient, Vectors
from ..optim.compiled import CompiledRule, Constants
from ..optim.groups import Group
from ..optim.optimizer import Optimizer
from ..optim.updater import Updater

if TYPE_CHECKING:
    from .device import Gpu
from .ops import updates


class GpuUpdate:
    """Applies an optimizer to vectors on a GPU, unsharded. Use within ``gpu.activate()``.

    Args:
        vectors: ``params``, the optimizer's slots, and ``average`` if there is one; shape (layout.size,) each.
        moving: Moving average of the parameters, or None.
        scaler_state: The state of the ``GradScaler``, which controls the step.
        frozen: See ``optim.updater.Updater``.

    Attributes:
        updater: Decides what is updated, and how.
    """

    def __init__(
        self,
        gpu: Gpu,
        optimizer: Optimizer,
        layout: Layout,
        vectors: Mapping[str, Array],
        moving: moving_average | None,
        scaler_state: Array,
        frozen: Array,
    ) -> None:
        slots = {name: vectors[name] for name in optimizer.slots}
        arguments = optimizer, layout, vectors["params"], slots, vectors.get("average"), moving, frozen
        self.updater = Updater(*arguments, lambda vectors: GpuBackend(gpu, scaler_state, vectors))

    def __call__(self, grads: Array, step: int, measure: bool = False) -> Any:
        """Apply ``grads``, shape (layout.size,), which is overwritten if norms are needed.

        Args:
            step: The 0-based step.
            measure: Whether to measure the gradient.

        Returns:
            The gradient's squared norm, on the device, shape (); None if it is not measured.
        """
        return self.updater.update_all(grads, step, measure=measure)


class GpuBackend:
    """``optim.backend.Backend`` of a GPU. ``scaler_state`` decides whether a step changes the vectors."""

    def __init__(self, gpu: Gpu, scaler_state: Array, vectors: Vectors) -> None:
        self._gpu, self._vectors, self._of_compiled_rules = gpu, vectors, vectors.of_compiled_rules()
        self._go = scaler_state[updates.GO : updates.GO + 1]
        self._factor = scaler_state[updates.FACTOR : updates.FACTOR + 1]
        self.xp, self.part = gpu.xp, max(1, vectors.params.size)
        self.copy_of, self.zeros = gpu.copy_of, gpu.zeros

    def update_segments(
        self, rule: CompiledRule, constants: Constants, group: Group, rate: float, gradient: Gradient, ema_weight: float
    ) -> None:
        segments = group.bounds, group.scales, group.l2, group.decay
        arguments = *segments, rate, *gradient[:3], *self._of_compiled_rules, ema_weight
        updates.update_segments(rule, constants, *arguments, go=self._go, factor=self._factor_of(gradient))

    def measure_segments(
        self, rule: CompiledRule | None, constants: Constants, group: Group, gradient: Gradient, out: Array
    ) -> None:
        segments = group.trust is not None, group.bounds, group.decay
        arguments = *segments, *gradient[:2], out, *self._of_compiled_rules[:3], group.sums
        updates.measure_segments(rule, constants, *arguments, go=self._go, factor=self._factor_of(gradient))

    def sum_rows(self, gradient: Gradient, start: int, stop: int, scale: Any, trained: bool) -> Array:
        (row,) = gradient.rows
        grads = row[start - gradient.origin : stop - gradient.origin] * scale
        if trained and not gradient.measured:
            grads *= self.number(self._factor, 0)
        return grads

    def number(self, values: Array, index: int) -> Any:
        number = self._gpu.empty((1,), self._vectors.params.dtype)
        number[...] = values[index : index + 1]
        return number

    def load(self, start: int, stop: int) -> Vectors:
        params, average, slots = self._vectors.part(start, stop)
        return Vectors(params.copy(), average.copy(), {name: slot.copy() for name, slot in slots.items()})

    def store(self, part: Vectors, start: int, stop: int) -> None:
        go, changed = self._go != 0, self._vectors.part(start, stop)
        for vector, values in (
            (changed.params, part.params),
            (changed.average, part.average),
            *((changed.slots[name], slot) for name, slot in part.slots.items()),
        ):
            self.xp.copyto(vector, values, where=go)

    def _factor_of(self, gradient: Gradient) -> Array | None:
        """Return the factor that is still to be applied to a gradient; None if there is none."""
        return None if gradient.measured else self._factor
