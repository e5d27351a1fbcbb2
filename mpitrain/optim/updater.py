"""Applies an optimizer to ranges of flat vectors, on the CPU or a GPU. Local; ranks communicate elsewhere.

``Updater`` is the algorithm: clipping, scaling by layers, and rules without a compiled version. ``groups`` determines
which options apply to which segment, and a ``Backend`` has the operations on arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.layout import Array, Layout
from .average import moving_average
from .backend import Backend, CpuBackend, Gradient, Vectors
from .compiled import CompiledRule, Constants
from .groups import Group, Range, Segment
from .optimizer import Optimizer


class Updater:
    """Binds an optimizer to the vectors that it updates; each rank may update a range [lo, hi) of them.

    If the optimizer's ``needs_sums`` is False, an update may be one call::

        updater.update(lo, hi, rows, step)

    Otherwise one call would ignore clipping and layers, and an update is two calls, with a sum over the ranks that
    share the vector in between::

        sums = updater.prepare(lo, hi, rows, out, step)
        updater.finish(lo, hi, out, sums_of_all_ranks, step)

    A rank that updates the whole vector calls ``update_all``, with any optimizer.

    Args:
        optimizer: The optimizer.
        layout: Layout of the vectors.
        params: Shape (layout.size,).
        slots: The optimizer's slots by name, each like ``params``; zeros before the first step.
        average: Like ``params``, and a copy of it before the first step; None without moving average.
        moving: Moving average that updates ``average``, or None.
        frozen: Shape (number of the layout's entries,), uint8: 1 for an entry that does not change for now; read at
            every update. None if all entries are trained.
        backend: Operations on the vectors.

    Attributes:
        schedule_offset: Added to the step for schedules of the learning rate, and not for rules that count updates.
        needs_sums: Whether a step uses ``prepare`` and ``finish`` instead of ``update``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        params: Array,
        slots: Mapping[str, Array],
        average: Array | None = None,
        moving: moving_average | None = None,
        frozen: Array | None = None,
        backend: Callable[[Vectors], Backend] = CpuBackend,
    ) -> None:
        assert set(slots) == set(optimizer.slots) and (average is None) == (moving is None)
        self.optimizer = optimizer
        self.needs_sums = optimizer.needs_sums
        self.layout = layout
        self.schedule_offset = 0
        self._moving, self._frozen = moving, np.zeros(len(layout.entries), np.uint8) if frozen is None else frozen
        average = params[:0] if average is None else average
        self._backend = backend(Vectors(params, average, {name: slots[name] for name in optimizer.slots}))
        self._first = self._in_order = self._backend.copy_of(np.zeros(1, np.int64))
        self._ranges: dict[tuple[int, int, bytes], Range] = {}

    @property
    def n_sums(self) -> int:
        """Length of the array returned by ``prepare``."""
        return 2 * len(self.layout.entries) if self.optimizer.layerwise else 1

    def update(
        self,
        lo: int,
        hi: int,
        rows: Array,
        step: int,
        *,
        order: Array | None = None,
        origin: int = 0,
        clip: float = 1.0,
        rate_scale: float = 1.0,
    ) -> None:
        """Update [lo, hi) with the gradient given by the sum of ``rows``.

        The result is bit-identical however [0, size) is split into ranges.

        Args:
            rows: Shape (n, hi - origin or more), C-contiguous, of the parameters' dtype.
            step: The 0-based step.
            order: Shape (k,), int64: indices of the rows to add, in this order; by default all rows in order.
            origin: Element of the vector that corresponds to the rows' first element.
            clip: Factor of the gradient of parameters, not of state.
            rate_scale: Factor of the learning rate.
        """
        of_range = self._range_of(lo, hi)
        self._use_clip(of_range, clip)
        self._apply(of_range, self._gradient(rows, order, origin), rate_scale, step)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use this optimizer from now on. Its slots and ``needs_sums`` must be those of the previous optimizer."""
        assert optimizer.slots == self.optimizer.slots and optimizer.needs_sums == self.needs_sums
        self.optimizer = optimizer
        self._ranges.clear()

    def update_all(self, grads: Array, step: int, *, measure: bool = False) -> Any:
        """Update the whole vector with the gradient ``grads``, shape (size,), which may be overwritten.

        Returns:
            The gradient's squared norm if ``measure``, else None; see ``squared_norm``.
        """
        size, rows = self.layout.size, grads.reshape(1, -1)
        if not self.needs_sums and not measure:
            self.update(0, size, rows, step)
            return None
        sums = self.prepare(0, size, rows, grads, step)
        self.finish(0, size, grads, sums, step)
        return self.squared_norm(sums)

    def squared_norm(self, sums: Array) -> Any:
        """Return the gradient's squared norm before clipping, as an array of shape (); for LAMB, of its direction.

        Args:
            sums: Results of ``prepare``, added over ranges that cover the whole vector.
        """
        return sums.reshape(-1, 2)[:, 1].sum() if self.optimizer.layerwise else sums[0]

    def prepare(self, lo: int, hi: int, rows: Array, out: Array, step: int, *, order: Array | None = None) -> Array:
        """Run the first half of an update: write the gradient (LAMB: the direction) to out[lo:hi], and return its sums.

        Args:
            out: Shape (size or more,): memory of which only this caller uses [lo, hi). It may be a row of
                ``rows``.
            order: As for ``update``.

        Returns:
            Squared norms over [lo, hi), float64, to be added over ranges that cover the whole vector. For a layerwise
            optimizer, the shape is (2 * number of the layout's entries,): one norm for each entry of the parameters and
            of ``out``. Otherwise it is (1,), for the gradient.
        """
        of_range = self._range_of(lo, hi)
        gradient = self._gradient(rows, order)
        for group in of_range.groups:
            self._measure(group, gradient, out, step)
        if not self.optimizer.layerwise:
            return of_range.sums[:, 1].sum(keepdims=True)
        sums = self._backend.zeros((len(self.layout.entries), 2), np.float64)
        for group in of_range.groups:
            sums[group.entries] = group.sums
        return sums.reshape(-1)

    def finish(self, lo: int, hi: int, out: Array, sums: Array, step: int, *, rate_scale: float = 1.0) -> None:
        """Run the second half of an update: apply the values that ``prepare`` has written to out[lo:hi].

        Args:
            out: As passed to ``prepare``.
            sums: Results of ``prepare``, added over all ranges.
            rate_scale: As for ``update``.
        """
        of_range = self._range_of(lo, hi)
        if self.optimizer.layerwise:
            of_range.clip = math.nan  # makes ``update`` set the scales again
            by_entry = sums.reshape(-1, 2)
            clip = self.optimizer.clip_factor(by_entry[:, 1].sum())
            for group in of_range.groups:
                self._scale_layers(group, by_entry, clip, rate_scale * group.options.rate(step + self.schedule_offset))
        elif self.optimizer.clip_norm is None:
            self._use_clip(of_range, 1.0)
        else:
            of_range.clip = math.nan
            self._set_clip(of_range, self.optimizer.clip_factor(sums[0]))
        self._apply(of_range, self._measured(out), rate_scale, step)

    def update_by_sums(
        self,
        ranges: Sequence[tuple[int, int]],
        rows: Array,
        out: Array,
        step: int,
        add_up: Callable[[Array], Array] | None = None,
        order: Array | None = None,
        measured: Sequence[tuple[int, int]] | None = None,
        rate_scale: float = 1.0,
    ) -> Any:
        """Update ranges by ``prepare`` and ``finish``, on the CPU; return the whole gradient's squared norm.

        Args:
            add_up: Gets the sums over the ranges that were measured, and returns those over the whole vector; None
                if these ranges are the whole vector.
            order: As for ``update``.
            measured: The ranges to measure, by default those to update.
        """
        own = np.zeros(self.n_sums)
        for lo, hi in ranges if measured is None else measured:
            own += self.prepare(lo, hi, rows, out, step, order=order)
        sums = own if add_up is None else add_up(own)
        for lo, hi in ranges:
            self.finish(lo, hi, out, sums, step, rate_scale=rate_scale)
        return self.squared_norm(sums)

    def _use_clip(self, of_range: Range, clip: float) -> None:
        """Set the scales of a range to this factor, unless they have it already."""
        if clip != of_range.clip:
            self._set_clip(of_range, clip)
            of_range.clip = clip

    def _set_clip(self, of_range: Range, clip: Any) -> None:
        for group in of_range.groups:
            self._backend.xp.copyto(group.scales, clip, where=group.trained)

    def _measure(self, group: Group, gradient: Gradient, out: Array, step: int) -> None:
        """Write the gradient, or the direction of the group's rule, to ``out``; set the group's ``sums``."""
        rule: CompiledRule | None = None
        constants: Constants = (0.0,)
        if group.measured is not None:
            fused = group.measured.fused(1.0, step)
            if fused is not None:
                rule, constants = fused
            else:
                self._write_directions(group, gradient, out, step)
                gradient = self._measured(out)
        self._backend.measure_segments(rule, constants, group, gradient, out)

    def _scale_layers(self, group: Group, sums: Array, clip: Any, rate: float) -> None:
        """Set the factors of a layerwise optimizer's segments; ``sums`` has shape (n_entries, 2)."""
        xp, trust = self._backend.xp, group.trust
        assert trust is not None
        xp.take(sums, group.entries, axis=0, out=group.sums)
        usable, ratios = trust.ratios(group.sums, group.decay, clip)
        scales = rate * group.factors
        xp.copyto(scales, scales * ratios, where=usable & group.decayed)
        if not trust.after_rule:  # otherwise the direction includes weight decay
            group.l2[...] = scales * group.decay
        xp.copyto(group.scales, clip * scales, where=group.trained)

    def _apply(self, of_range: Range, gradient: Gradient, rate_scale: float, step: int) -> None:
        ema_weight = 0.0 if self._moving is None else 1.0 - self._moving.decay_at(step)
        for group in of_range.groups:
            rate = decay_rate = rate_scale * group.options.rate(step + self.schedule_offset) * group.factor
            if group.trust is not None:
                rate, decay_rate = 1.0, 0.0  # the scales include both factors
            fused = group.applied.fused(rate, step)
            if fused is None:
                self._apply_rule(group, rate, decay_rate, gradient, step, ema_weight)
            else:
                self._backend.update_segments(*fused, group, decay_rate, gradient, ema_weight)

    def _apply_rule(
        self, group: Group, rate: float, decay_rate: float, gradient: Gradient, step: int, ema_weight: float
    ) -> None:
        """Update the group as ``update_segments`` would, by a rule that is not compiled."""
        backend, update = self._backend, group.applied.update
        weight_decay = decay_rate * group.options.weight_decay
        for index, segment in enumerate(group.segments):
            scale, l2 = backend.number(group.scales, index), backend.number(group.l2, index)
            for start, stop in self._parts(segment):
                grads = backend.sum_rows(gradient, start, stop, scale, segment.trained)
                part = params, average, slots = backend.load(start, stop)
                if not segment.trained:
                    if segment.added:
                        params += grads
                    average[...] = params[: average.size]
                else:
                    if segment.decayed and group.adds_l2:
                        grads += l2 * params
                    if segment.decayed and weight_decay:
                        params *= 1 - weight_decay
                    if group.factor or not group.applied.changes_at_rate_zero:
                        update(params, grads, slots, rate, step)
                    average += ema_weight * (params[: average.size] - average)
                backend.store(part, start, stop)

    def _write_directions(self, group: Group, gradient: Gradient, out: Array, step: int) -> None:
        """Write the directions of a rule that is not compiled to ``out``: its negative steps, plus decay."""
        backend = self._backend
        for index, segment in enumerate(group.segments):
            decay = backend.number(group.decay, index)
            for start, stop in self._parts(segment):
                grads = backend.sum_rows(gradient, start, stop, 1.0, segment.trained)
                if segment.trained:
                    part = backend.load(start, stop)
                    steps = backend.zeros(grads.shape, grads.dtype)
                    group.options.update(steps, grads, part.slots, 1.0, step)
                    grads = decay * part.params - steps
                    backend.store(part, start, stop)
                out[start:stop] = grads

    def _parts(self, segment: Segment) -> Iterator[tuple[int, int]]:
        """Yield the segment in parts of the size that the backend works on at a time."""
        size = max(self._backend.part, self.optimizer.part)
        for start in range(segment.start, segment.stop, size):
            yield start, min(start + size, segment.stop)

    def _gradient(self, rows: Array, order: Array | None, origin: int = 0) -> Gradient:
        """Return the gradient of some rows, by default of all rows in order."""
        if order is None:
            if len(self._in_order) != len(rows):
                self._in_order = self._backend.copy_of(np.arange(len(rows)))
            order = self._in_order
        return Gradient(rows, order, origin)

    def _measured(self, out: Array) -> Gradient:
        """Return the gradient, or the direction, that ``prepare`` has written."""
        return Gradient(out.reshape(1, -1), self._first, measured=True)

    def _range_of(self, lo: int, hi: int) -> Range:
        """Return the groups of [lo, hi), cached by the range and the frozen parameters."""
        key = lo, hi, self._frozen.tobytes()
        if key not in self._ranges:
            has_average = self._moving is not None
            self._ranges[key] = Range(self.optimizer, self.layout, key, self._backend.copy_of, has_average)
        return self._ranges[key]
