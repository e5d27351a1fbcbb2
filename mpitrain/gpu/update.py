"""An optimizer step on a GPU: a sequence of kernels that depend on each other's results; the host does not wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.layout import Array, Layout
from ..optim.average import moving_average
from ..optim.optimizer import Optimizer
from ..optim.updater import segments_of

if TYPE_CHECKING:
    from .device import Gpu
from .ops import updates


class GpuUpdate:
    """Applies an optimizer to vectors on a GPU, unsharded. Use within ``gpu.activate()``.

    Args:
        vectors: ``params``, the optimizer's slots, and ``average`` if there is one; shape (layout.size,) each.
        moving: Moving average of the parameters, or None.
        state: The state that controls the step; see ``updates.decide_update``.
        frozen: See ``optim.updater.Updater``.
    """

    def __init__(
        self,
        gpu: Gpu,
        optimizer: Optimizer,
        layout: Layout,
        vectors: Mapping[str, Array],
        moving: moving_average | None,
        state: Array,
        frozen: Array,
    ) -> None:
        self._optimizer, self._moving = optimizer, moving
        self._go, self._factor = state[updates.GO : updates.GO + 1], state[updates.FACTOR : updates.FACTOR + 1]
        params = vectors["params"]
        none = gpu.empty((0,), params.dtype)
        self._params, self._xp = params, gpu.xp
        self._slots = {name: vectors[name] for name in optimizer.slots}
        slot0, slot1 = [*self._slots.values(), none, none][:2]
        self._vectors = params, slot0, slot1  # those of compiled rules
        self._average = vectors.get("average", none)
        self._gpu, self._layout, self._frozen = gpu, layout, frozen
        self._first = gpu.copy_of(np.zeros(1, np.int64))
        self._scale = gpu.empty((1,), params.dtype)
        self._split(frozen.tobytes())

    def _split(self, flags: bytes) -> None:
        """Split the vector into segments, as determined by the frozen parameters."""
        gpu, optimizer = self._gpu, self._optimizer
        self._flags = flags
        found = segments_of(optimizer, self._layout, 0, self._layout.size, flags)
        self._count = len(found.bounds)
        self._groups = [(1.0, slice(0, self._count))] if optimizer.layerwise else found.by_factor()
        self._factors = gpu.copy_of(found.factors)
        self._segments, self._decayed = gpu.copy_of(found.bounds), gpu.copy_of(found.decayed)
        self._decay = gpu.copy_of(optimizer.weight_decay * found.decayed)
        self._scales = gpu.copy_of(np.ones(self._count))
        self._l2 = gpu.copy_of(optimizer.l2 * found.decayed)
        self._no_decay = gpu.copy_of(np.zeros(self._count))
        self._sums = gpu.copy_of(np.zeros((self._count, 2)))
        self._parts = list(zip(found.bounds.tolist(), found.decayed.tolist(), found.factors.tolist(), strict=True))

    def __call__(self, grads: Array, step: int) -> None:
        """Apply ``grads``, shape (layout.size,), which is overwritten if the optimizer needs norms.

        Args:
            step: The 0-based step.
        """
        if (flags := self._frozen.tobytes()) != self._flags:
            self._split(flags)
        rows, optimizer = grads.reshape(1, -1), self._optimizer
        rate = optimizer.rate(step)
        if not optimizer.needs_sums:
            self._apply(rows, rate, step, self._factor)
            return
        self._measure(rows, step)
        largest = math.inf if optimizer.clip_norm is None else optimizer.clip_norm
        if not optimizer.layerwise:
            updates.clip_scales(self._segments, self._sums, largest, self._scales)
            self._apply(rows, rate, step, None)
            return
        # If the measured direction includes weight decay, do not add it again.
        decay = optimizer.weight_decay if optimizer.direction(step) is None else 0.0
        sizes = self._segments, self._sums, self._decayed, rate
        updates.layer_scales(*sizes, optimizer.trust_ratio, largest, decay, self._scales, self._l2)
        if optimizer.rate_factors:
            self._scales *= self._factors
        self._apply(rows, 1.0, step, None)  # the scales include the learning rate

    def _measure(self, rows: Array, step: int) -> None:
        direction = self._optimizer.direction(step)
        how = direction is not None, self._optimizer.layerwise, direction or (0.0, 0.0, 0.0, 0.0)
        given = self._segments, self._decay, rows, self._first, rows[0]
        updates.measure_segments(*how, *given, *self._vectors, self._sums, go=self._go, factor=self._factor)

    def _apply(self, rows: Array, rate: float, step: int, factor: Any) -> None:
        optimizer = self._optimizer
        follow = 0.0 if self._moving is None else 1.0 - self._moving.decay_at(step)
        if optimizer.fused(rate, step) is None:
            self._apply_rule(rows[0], rate, step, factor, follow)
            return
        decay = self._no_decay if optimizer.layerwise else self._decay
        for rate_factor, group in self._groups:
            scaled = rate * rate_factor
            fused = optimizer.fused(scaled, step)
            assert fused is not None
            given = self._segments[group], self._scales[group], self._l2[group], decay[group], rows, self._first
            more = {"rate": scaled, "go": self._go, "factor": factor}
            updates.update_segments(*fused, *given, 0, *self._vectors, self._average, follow, **more)

    def _apply_rule(self, grads: Array, rate: float, step: int, factor: Any, follow: float) -> None:
        """Do what ``update_segments`` does, with a rule that is not compiled: on copies, for a step may be skipped."""
        optimizer, go = self._optimizer, self._go != 0
        self._scale[...] = self._scales[:1] if factor is None else self._scales[:1] * factor
        changed: list[tuple[Array, Array]] = []
        for (lo, hi, trained), decayed, rate_factor in self._parts:
            part, scaled = slice(lo, hi), rate * rate_factor
            params, slots = self._params[part].copy(), {name: slot[part].copy() for name, slot in self._slots.items()}
            if not trained:
                params += grads[part]
            else:
                gradient = grads[part] * self._scale + optimizer.l2 * decayed * params
                params *= 1 - scaled * optimizer.weight_decay * decayed
                optimizer.update(params, gradient, slots, scaled, step)
                changed += [(self._slots[name][part], slot) for name, slot in slots.items()]
            changed.append((self._params[part], params))
            if self._moving is not None:
                before = self._average[part]
                changed.append((before, before + follow * (params - before) if trained else params))
        for vector, values in changed:
            self._xp.copyto(vector, values, where=go)
