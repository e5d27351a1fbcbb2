"""Applies an optimizer to ranges of flat vectors. Local; ranks communicate elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..core.device import CPU
from ..core.kernels import sum_rows
from ..core.layout import Array, Layout
from . import rules
from .average import moving_average
from .optimizer import Optimizer

_FIRST = np.zeros(1, np.int64)
_PART = 8 * rules.BLOCK  # elements at a time of a rule without a kernel: gradient and temporaries stay in the L2 cache


class Segments(NamedTuple):
    """A range of the vector, split where its treatment changes, in ascending order of the factors.

    Attributes:
        bounds: Shape (k, 3), int64: start, stop, and whether it is trained; the gradient of other segments is added.
        entries: Shape (k,): index of the segment's (first) entry in the layout.
        decayed: Shape (k,), float64: 1 where ``decay_names`` matches, else 0.
        factors: Shape (k,), float64: factors of the learning rate.
    """

    bounds: Array
    entries: Array
    decayed: Array
    factors: Array

    def by_factor(self) -> list[tuple[float, slice]]:
        """Return each factor with its segments."""
        factors, first = np.unique(self.factors, return_index=True)
        stops = [*first[1:], len(self.factors)]
        return [(float(factor), slice(a, b)) for factor, a, b in zip(factors, first, stops, strict=False)]


def segments_of(optimizer: Optimizer, layout: Layout, lo: int, hi: int, frozen: bytes | None = None) -> Segments:
    """Return [lo, hi) as segments; for a layerwise optimizer each entry is a separate segment.

    Args:
        frozen: For each entry whether it is not trained, although it is a parameter. Its gradient is zero.
    """
    found: list[tuple[float, int, int, int, int, float]] = []  # factor, start, stop, trained, entry, decayed
    for index, entry in enumerate(layout.entries):
        start, stop = max(entry.start, lo), min(entry.stop, hi)
        if start >= stop:
            continue
        trained = int(entry.kind == "param" and not (frozen and frozen[index]))
        factor, decays = optimizer.rate_factor(entry.name), float(optimizer.decays(entry.name))
        if found and not optimizer.layerwise:
            before = found[-1]
            if (before[0], before[3], before[5]) == (factor, trained, decays):
                # Including the gap, whose zeros remain zero under every rule.
                found[-1] = (factor, before[1], stop, trained, before[4], decays)
                continue
        found.append((factor, start, stop, trained, index, decays))
    rows = np.array(sorted(found), np.float64).reshape(-1, 6)
    return Segments(rows[:, 1:4].astype(np.int64), rows[:, 4].astype(np.int64), rows[:, 5].copy(), rows[:, 0].copy())


class _RangeArguments:
    """The segments of a range and the arguments of their update.

    Attributes:
        segments, entries, decayed, factors: As in ``Segments``.
        groups: Each factor of the learning rate with its segments; one group of factor 1 for a layerwise optimizer,
            whose ``scales`` include the factors.
        decay: Shape (k,), float64: weight decay where ``decay_names`` matches, else 0.
        scales, l2, shrink: Shape (k,), float64: arguments of ``rules.update_segments``, set at every step.
        sums: Shape (k, 2), float64: output of ``rules.measure_segments``.
        clip: Clip factor for which ``update`` has set ``scales``.
    """

    def __init__(self, optimizer: Optimizer, segments: Segments) -> None:
        self.segments, self.entries, self.decayed, self.factors = segments
        count = len(self.segments)
        self.groups = [(1.0, slice(0, count))] if optimizer.layerwise else segments.by_factor()
        self.decay, self.l2 = optimizer.weight_decay * self.decayed, optimizer.l2 * self.decayed
        self.scales, self.shrink, self.sums, self.clip = np.ones(count), np.zeros(count), np.zeros((count, 2)), 1.0


class Updater:
    """Binds an optimizer to the vectors that it updates; every method handles a range [lo, hi) of them.

    If the optimizer's ``needs_sums`` is False, an update is one call::

        updater.update(lo, hi, rows, step)

    Otherwise it would ignore clipping and layers, and an update is two calls, with a sum over the ranks that share
    the vector in between::

        sums = updater.prepare(lo, hi, rows, own, step)
        updater.finish(lo, hi, own, sums_of_all_ranks, step)

    A rank that updates the whole vector calls ``update_all``, with any optimizer.

    Args:
        optimizer: The optimizer.
        layout: Layout of the vectors.
        params: Shape (layout.size,).
        slots: The optimizer's slots by name, each like ``params``; zeros before the first step.
        average: Like ``params``, and a copy of it before the first step; None without moving average.
        moving: Moving average that updates ``average``, or None.
        frozen: Shape (number of the layout's entries,), uint8: 1 for an entry that does not change for now; read at
            every update. None if all are trained.
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
    ) -> None:
        assert set(slots) == set(optimizer.slots) and (average is None) == (moving is None)
        none = np.empty(0, params.dtype)
        self.optimizer = optimizer
        self.layout = layout
        self._params, self._average, self._moving = params, none if average is None else average, moving
        self._frozen = np.zeros(len(layout.entries), np.uint8) if frozen is None else frozen
        self._slots = {name: slots[name] for name in optimizer.slots}
        slot0, slot1 = [*self._slots.values(), none, none][:2]
        self._vectors = params, slot0, slot1  # those of compiled rules
        self._scratch = CPU.empty((_PART,), params.dtype)
        self._rows_in_order = np.arange(1)
        self._cached_arguments: dict[tuple[int, int, bytes], _RangeArguments] = {}

    @property
    def needs_sums(self) -> bool:
        """Whether a step uses ``prepare`` and ``finish`` instead of ``update``."""
        return self.optimizer.needs_sums

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
        args = self._arguments_of(lo, hi)
        if clip != args.clip:
            args.clip = clip
            np.copyto(args.scales, np.where(args.segments[:, 2] == 1, clip, 1.0))
        if order is None:
            order = self._in_order(len(rows))
        self._apply(args, rows, order, origin, rate_scale * self.optimizer.rate(step), step)

    def update_all(self, grads: Array, step: int) -> None:
        """Update the whole vector with the gradient ``grads``, shape (size,), which may be overwritten."""
        size, rows = len(self._params), grads[np.newaxis]
        if not self.needs_sums:
            self.update(0, size, rows, step)
        else:
            sums = self.prepare(0, size, rows, grads, step)
            self.finish(0, size, grads, sums, step)

    def prepare(self, lo: int, hi: int, rows: Array, own: Array, step: int, *, order: Array | None = None) -> Array:
        """Run the first half of an update: write the gradient (LAMB: the direction) to own[lo:hi]; return its sums.

        Args:
            own: Shape (size or more,): memory of which only this caller uses [lo, hi). It may be a row of
                ``rows``.
            order: As for ``update``.

        Returns:
            Squared norms over [lo, hi), float64, to be added over ranges that cover the whole vector. The shape is (1,)
            for the gradient; for a layerwise optimizer it is (2 * number of the layout's entries,), for each entry of
            the parameters and of ``own``.
        """
        args = self._arguments_of(lo, hi)
        direction, layerwise = self.optimizer.direction(step), self.optimizer.layerwise
        order = self._in_order(len(rows)) if order is None else order
        how = direction is not None, layerwise, direction or (0.0, 0.0, 0.0, 0.0)
        given = args.segments, args.decay, rows, order, own
        rules.measure_segments(*how, *given, *self._vectors, args.sums, self._scratch)
        if not layerwise:
            return np.array([args.sums[:, 1].sum()])
        sums = np.zeros((len(self.layout.entries), 2))
        sums[args.entries] = args.sums
        return sums.reshape(-1)

    def finish(self, lo: int, hi: int, own: Array, sums: Array, step: int, *, rate_scale: float = 1.0) -> None:
        """Run the second half of an update: apply what ``prepare`` has written to own[lo:hi].

        Args:
            own: As passed to ``prepare``.
            sums: Results of ``prepare``, added over all ranges.
            rate_scale: As for ``update``.
        """
        args = self._arguments_of(lo, hi)
        args.clip = math.nan  # makes ``update`` set the scales again
        rate = rate_scale * self.optimizer.rate(step)
        if self.optimizer.layerwise:
            self._scale_layers(args, sums.reshape(-1, 2), rate)
            rate = 1.0  # the scales include it
        else:
            clip = self.optimizer.clip_factor(float(sums[0]))
            np.copyto(args.scales, np.where(args.segments[:, 2] == 1, clip, 1.0))
        self._apply(args, own[np.newaxis], _FIRST, 0, rate, step)

    def _scale_layers(self, args: _RangeArguments, sums: Array, rate: float) -> None:
        """Set the factors of a layerwise optimizer's segments; ``sums`` has shape (n_entries, 2)."""
        optimizer = self.optimizer
        clip = optimizer.clip_factor(float(sums[:, 1].sum()))
        ratios = optimizer.trust_ratios(sums[args.entries], clip)
        scales = rate * args.factors * np.where(args.decayed == 1, ratios, 1.0)
        if optimizer.direction(0) is None:  # otherwise the direction includes decay
            np.multiply(scales, optimizer.weight_decay * args.decayed, out=args.l2)
        np.copyto(args.scales, np.where(args.segments[:, 2] == 1, clip * scales, 1.0))

    def _apply(self, args: _RangeArguments, rows: Array, order: Array, origin: int, rate: float, step: int) -> None:
        optimizer = self.optimizer
        follow = 0.0 if self._moving is None else 1.0 - self._moving.decay_at(step)
        for factor, group in args.groups:
            scaled = rate * factor
            if optimizer.weight_decay and not optimizer.layerwise:
                np.multiply(args.decayed[group], scaled * optimizer.weight_decay, out=args.shrink[group])
            given = args.segments[group], args.scales[group], args.l2[group], args.shrink[group]
            fused = optimizer.fused(scaled, step)
            if fused is None:
                self._apply_rule(given, rows, order, origin, scaled, step, follow)
            else:
                vectors = *self._vectors, self._average
                rules.update_segments(*fused, *given, rows, order, origin, *vectors, follow, self._scratch)

    def _apply_rule(
        self, given: tuple[Array, ...], rows: Array, order: Array, origin: int, rate: float, step: int, follow: float
    ) -> None:
        """Do what ``rules.update_segments`` does, with a rule that is not compiled.

        Args:
            given: Segments, scales, l2 and shrink.
        """
        for (lo, hi, trained), scale, l2, shrink in zip(*given, strict=True):
            for start in range(lo, hi, _PART):
                part = slice(start, min(start + _PART, hi))
                params, average = self._params[part], self._average[part]
                grads = self._scratch[: params.size]
                sum_rows(rows, order, part.start - origin, part.stop - origin, scale, grads)
                if not trained:
                    params += grads
                    average[:] = params[: average.size]
                    continue
                if l2:
                    grads += float(l2) * params
                if shrink:
                    params *= 1 - float(shrink)
                slots = {name: slot[part] for name, slot in self._slots.items()}
                self.optimizer.update(params, grads, slots, rate, step)
                average += follow * (params[: average.size] - average)

    def _in_order(self, rows: int) -> Array:
        """Return all row indices in order."""
        if len(self._rows_in_order) != rows:
            self._rows_in_order = np.arange(rows)
        return self._rows_in_order

    def _arguments_of(self, lo: int, hi: int) -> _RangeArguments:
        """Return the update arguments of [lo, hi), cached by range and by what is frozen."""
        key = lo, hi, self._frozen.tobytes()
        found = self._cached_arguments.get(key)
        if found is None:
            segments = segments_of(self.optimizer, self.layout, *key)
            found = self._cached_arguments[key] = _RangeArguments(self.optimizer, segments)
        return found
