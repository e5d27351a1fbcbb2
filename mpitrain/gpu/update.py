"""An optimizer step on a GPU: a sequence of kernels that depend on each other's results; the host does not wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.layout import Array, Layout
from ..optim.average import moving_average
from ..optim.optimizer import Optimizer
from ..optim.updater import segments_of
from . import ops as launch
from .device import Gpu


class GpuUpdate:
    """Applies an optimizer to vectors on a GPU, unsharded. Use within ``gpu.activate()``.

    Args:
        vectors: ``params``, the optimizer's slots, and ``average`` if there is one; shape (layout.size,) each.
        moving: Moving average of the parameters, or None.
        state: The state that controls the step; see ``ops.decide_update``.
    """

    def __init__(
        self,
        gpu: Gpu,
        optimizer: Optimizer,
        layout: Layout,
        vectors: Mapping[str, Array],
        moving: moving_average | None,
        state: Array,
    ) -> None:
        self._optimizer, self._moving = optimizer, moving
        self._go, self._factor = state[launch.GO : launch.GO + 1], state[launch.FACTOR : launch.FACTOR + 1]
        params = vectors["params"]
        none = gpu.empty((0,), params.dtype)
        self._params = params
        self._slot0, self._slot1 = ([vectors[name] for name in optimizer.slots] + [none, none])[:2]
        self._average = vectors.get("average", none)
        found = segments_of(optimizer, layout, 0, layout.size)
        self._count = len(found.bounds)
        self._segments, self._decayed = gpu.copy_of(found.bounds), gpu.copy_of(found.decayed)
        self._decay = gpu.copy_of(optimizer.weight_decay * found.decayed)
        self._scales = gpu.copy_of(np.ones(self._count))
        self._l2 = gpu.copy_of(optimizer.l2 * found.decayed)
        self._no_decay = gpu.copy_of(np.zeros(self._count))
        self._sums = gpu.copy_of(np.zeros((self._count, 2)))
        self._first = gpu.copy_of(np.zeros(1, np.int64))

    def __call__(self, grads: Array, step: int) -> None:
        """Apply ``grads``, shape (layout.size,), which is overwritten if the optimizer needs norms.

        Args:
            step: The 0-based step.
        """
        rows, optimizer = grads.reshape(1, -1), self._optimizer
        rate = optimizer.rate(step)
        if not optimizer.needs_sums:
            self._apply(rows, rate, step, self._factor)
            return
        self._measure(rows, step)
        largest = math.inf if optimizer.clip_norm is None else optimizer.clip_norm
        if not optimizer.layerwise:
            launch.clip_scales(self._segments, self._sums, largest, self._scales)
            self._apply(rows, rate, step, None)
            return
        # If the measured direction includes weight decay, do not add it again.
        decay = optimizer.weight_decay if optimizer.direction(step) is None else 0.0
        sizes = self._segments, self._sums, self._decayed, rate
        launch.layer_scales(*sizes, optimizer.trust_ratio, largest, decay, self._scales, self._l2)
        self._apply(rows, 1.0, step, None)  # the scales include the learning rate

    def _measure(self, rows: Array, step: int) -> None:
        direction = self._optimizer.direction(step)
        launch.measure_segments(
            direction is not None,
            self._optimizer.layerwise,
            direction or (0.0, 0.0, 0.0, 0.0),
            self._segments,
            self._decay,
            rows,
            self._first,
            rows[0],
            self._params,
            self._slot0,
            self._slot1,
            self._sums,
            go=self._go,
            factor=self._factor,
        )

    def _apply(self, rows: Array, rate: float, step: int, factor: Any) -> None:
        optimizer = self._optimizer
        launch.update_segments(
            optimizer.rule,
            optimizer.constants(rate, step),
            self._segments,
            self._scales,
            self._l2,
            self._no_decay if optimizer.layerwise else self._decay,
            rows,
            self._first,
            0,
            self._params,
            self._slot0,
            self._slot1,
            self._average,
            0.0 if self._moving is None else 1.0 - self._moving.decay_at(step),
            rate=rate,
            go=self._go,
            factor=factor,
        )
