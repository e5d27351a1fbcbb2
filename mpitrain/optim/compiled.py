"""Compiled update rules: one pass over memory, block by block.

A block is so small that its gradient, parameters and slots stay in the L1 cache. The loops over a block are separate
and short, because only such loops vectorize.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..core.kernels import kernel, reduction, sum_rows
from ..core.layout import Array

BLOCK = 2048  # elements: parameters, gradient and two slots of float32 fill an L1 cache of 32 KiB
SCRATCH = 2 * BLOCK  # number of elements of temporary memory

Constants = tuple[float, ...]
CONSTANTS, SLOTS = 6, 2  # maximum numbers

RULES: dict[str, CompiledRule] = {}  # rules by name; the CUDA source ``optim`` contains all of them


@dataclass(frozen=True, eq=False)
class CompiledRule:
    """The arithmetic of an update rule: one text for NumPy, CPU kernels and GPUs. All rules share the other loops.

    Attributes:
        name: Name of the rule; names are unique.
        constants: Names of the constants in the text, in their order.
        slots: Names of the slots in the text.
        text: Statements that mean the same in Python and in C++, of one element or of whole arrays: ``p`` of the
            parameters, ``g`` of the gradient, and of each slot, by its name, with ``+ - * /``, parentheses and
            ``sqrt``. They only subtract from ``p``, which they do not use otherwise, so that ``measure_segments`` can
            apply them to zeros.

    Raises:
        ValueError: There are too many constants or slots.
    """

    name: str
    constants: tuple[str, ...]
    slots: tuple[str, ...]
    text: str

    def __post_init__(self) -> None:
        if len(self.constants) > CONSTANTS or len(self.slots) > SLOTS:
            raise ValueError(
                f"the rule {self.name} has {len(self.constants)} constants and {len(self.slots)} slots, but kernels "
                f"have {CONSTANTS} and {SLOTS}: define the optimizer by Optimizer.update alone, or add arguments to "
                "the kernels, in optim/compiled.py, optim/backend.py, gpu/sources.py, gpu/ops/updates.py and optim.cu"
            )
        assert self.name not in RULES
        RULES[self.name] = self

    @cached_property
    def block(self) -> Callable[[Array, Array, Array, Array, Constants], None]:
        """A ``kernel`` ``(params, grads, slot0, slot1, constants)`` that changes a block in place."""
        lines = [f"{name} = p.dtype.type(constants[{index}])" for index, name in enumerate(self.constants)]
        lines += [f"{name} = slot{index}" for index, name in enumerate(self.slots)]
        element = re.sub(rf"\b({'|'.join(('p', 'g', *self.slots))})\b", r"\1[i]", self.text)
        body = "".join(f"    {line}\n" for line in (*lines, "for i in range(p.size):", f"    {element}"))
        defined: dict[str, Any] = {"__name__": __name__, "sqrt": math.sqrt}
        exec(f"def {self.name}(p, g, slot0, slot1, constants):\n{body}", defined)
        return kernel(defined[self.name])

    def apply(self, params: Array, grads: Array, slots: Mapping[str, Array], constants: Constants) -> None:
        """Change arrays of NumPy or CuPy in place; ``slots`` in the order of the rule's."""
        arrays = dict(zip(self.slots, slots.values(), strict=True))
        values = {
            "p": params,
            "g": grads,
            "sqrt": np.sqrt,
            **arrays,
            **dict(zip(self.constants, constants, strict=True)),
        }
        exec(self.text, values)
        for name, array in arrays.items():
            array[...] = values[name]

    @cached_property
    def update_segments(self) -> Callable[..., None]:
        """``update_segments`` of ``_update_with``."""
        return _update_with(self.block)

    @cached_property
    def measure_segments(self) -> Callable[..., None]:
        """``measure_segments`` of ``_measure_with`` for the rule's direction."""
        return _measure_with(_direction_with(self.block))


def _update_with(block: Any) -> Callable[..., None]:
    @kernel
    def update_segments(
        constants: Constants,
        segments: Array,
        scales: Array,
        l2: Array,
        decay: Array,
        rate: float,
        rows: Array,
        order: Array,
        origin: int,
        params: Array,
        slot0: Array,
        slot1: Array,
        average: Array,
        ema_weight: float,
        scratch: Array,
    ) -> None:
        """Update params, slots and average on every segment.

        Args:
            constants: Arguments of the rule.
            segments: Shape (k, 3), int64: start, stop, and 1 for trained parameters, else 0.
            scales: Shape (k,), float64: factor of the sum of rows, which gives the gradient; 0 for frozen parameters.
            l2: Shape (k,), float64: ``l2 * params`` is added to the gradient.
            decay: Shape (k,), float64: ``rate * decay * params`` is subtracted from params before the update.
            rows: Shape (n, >= size), C-contiguous: gradients.
            order: Shape (m,), int64: indices of the rows to add, in this order.
            origin: Element of params that corresponds to the rows' first element.
            params, slot0, slot1, average: Shape (size,), of one dtype; empty if unused.
            ema_weight: Fraction by which ``average`` moves towards params.
            scratch: Shape (SCRATCH,).
        """
        for s in range(segments.shape[0]):
            shrink = rate * decay[s]
            for start in range(segments[s, 0], segments[s, 1], BLOCK):
                stop = min(start + BLOCK, segments[s, 1])
                # Slices, so that the inner loops start at zero: only such loops vectorize.
                p, a, g = params[start:stop], average[start:stop], scratch[: stop - start]
                sum_rows(rows, order, start - origin, stop - origin, scales[s], g)
                if segments[s, 2] == 0:
                    if scales[s] != 0:
                        add_scaled(p, 1.0, g)
                    a[:] = p[: a.size]
                    continue
                if l2[s] != 0:
                    add_scaled(g, l2[s], p)
                if shrink != 0:
                    _multiply(p, 1 - shrink)
                block(p, g, slot0[start:stop], slot1[start:stop], constants)
                _move_average(a, p, ema_weight)

    return update_segments


def _measure_with(direct: Any) -> Callable[..., None]:
    @kernel
    def measure_segments(
        constants: Constants,
        param_norms: bool,
        segments: Array,
        decay: Array,
        rows: Array,
        order: Array,
        out: Array,
        params: Array,
        slot0: Array,
        slot1: Array,
        sums: Array,
        scratch: Array,
    ) -> None:
        """Write each segment's gradient, or a rule's direction, to ``out``; sum its squares.

        Args:
            sums: Shape (k, 2), float64: output, the sums of squares of params (if ``param_norms``) and of the values
                written to ``out``.
            decay: Shape (k,), float64: ``decay * params`` is added to a direction.

        The other arguments are as in ``update_segments``; ``out`` may be one of the rows.
        """
        scratch[BLOCK:SCRATCH] = 0
        for s in range(segments.shape[0]):
            sums[s, 0] = sums[s, 1] = 0
            for start in range(segments[s, 0], segments[s, 1], BLOCK):
                stop = min(start + BLOCK, segments[s, 1])
                p, g = params[start:stop], scratch[: stop - start]
                sum_rows(rows, order, start, stop, 1.0, g)
                if segments[s, 2] == 1:
                    step = scratch[BLOCK : BLOCK + stop - start]
                    direct(p, g, slot0[start:stop], slot1[start:stop], constants, decay[s], step)
                    if param_norms:
                        sums[s, 0] += _sum_squares(p)
                    sums[s, 1] += _sum_squares(g)
                out[start:stop] = g

    return measure_segments


def _direction_with(block: Any) -> Callable[..., None]:
    @kernel
    def write_direction(
        p: Array, g: Array, slot0: Array, slot1: Array, constants: Constants, decay: float, step: Array
    ) -> None:
        """Replace the gradient with the rule's negative step, plus ``decay * p``; ``step`` is and remains zero."""
        block(step, g, slot0, slot1, constants)
        shrink = p.dtype.type(decay)
        for i in range(g.size):
            g[i] = shrink * p[i] - step[i]
            step[i] = 0

    return write_direction


@kernel
def _keep_gradient(
    p: Array, g: Array, slot0: Array, slot1: Array, constants: Constants, decay: float, step: Array
) -> None:
    """Do nothing: the gradient itself is measured."""


measure_gradients = _measure_with(_keep_gradient)


@kernel
def add_scaled(y: Array, factor: float, x: Array) -> None:
    """Set y = y + factor * x."""
    c = y.dtype.type(factor)
    for i in range(y.size):
        y[i] += c * x[i]


@kernel
def _multiply(y: Array, factor: float) -> None:
    c = y.dtype.type(factor)
    for i in range(y.size):
        y[i] *= c


@kernel
def _move_average(average: Array, p: Array, weight: float) -> None:
    c = p.dtype.type(weight)
    for i in range(average.size):
        average[i] += c * (p[i] - average[i])


@reduction
def _sum_squares(x: Array) -> float:
    total = 0.0
    for i in range(x.size):
        value = float(x[i])
        total += value * value
    return total
