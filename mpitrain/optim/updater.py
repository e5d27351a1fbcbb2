"""Applies an optimizer to ranges of flat vectors, on the CPU or a GPU. Local; ranks communicate elsewhere.

``Updater`` is the algorithm: which options apply to which segment, clipping, scaling by layers, and rules without a
compiled version. A ``Backend`` has the operations on arrays that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..core.device import CPU
from ..core.kernels import sum_rows
from ..core.layout import Array, Layout
from . import compiled
from .average import moving_average
from .compiled import CompiledRule, Constants
from .optimizer import Optimizer
from .rules import sgd

_ALONG_DIRECTION = sgd(1.0)  # the rule of a step along a direction that was measured


class Frozen:
    """Which parameters do not change for now; it may differ from step to step.

    Attributes:
        flags: Shape (number of the layout's entries,), uint8: 1 for an entry that does not change. Ranks of a node may
            share it; all ranks that update must set it before the same step.
    """

    def __init__(self, layout: Layout, names: Collection[str] = ()) -> None:
        self.flags = np.array([entry.name in names for entry in layout.entries], np.uint8)

    def share(self, flags: Array) -> None:
        """Keep the flags in ``flags``, memory that is shared by several ranks."""
        flags[...] = self.flags
        self.flags = flags


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
        """Return params, two slots and the average, the arguments of compiled rules; unused slots are empty."""
        slot0, slot1 = [*self.slots.values(), self.params[:0], self.params[:0]][:2]
        return self.params, slot0, slot1, self.average

    def part(self, start: int, stop: int) -> Vectors:
        """Return a range of the vectors; it shares their memory."""
        part = slice(start, stop)
        return Vectors(self.params[part], self.average[part], {name: slot[part] for name, slot in self.slots.items()})


class Gradient(NamedTuple):
    """A gradient, as the sum of some rows.

    Attributes:
        rows: Shape (n, >= size - origin), C-contiguous.
        order: Shape (m,), int64: indices of the rows to add, in this order.
        origin: Element of the vectors that corresponds to the rows' first element.
        measured: Whether ``measure_segments`` has written it, with the factors that the backend's device knows.
    """

    rows: Array
    order: Array
    origin: int = 0
    measured: bool = False


class Segment(NamedTuple):
    """A part of the vector whose elements have the same options.

    Attributes:
        start, stop: Its elements.
        trained: Whether it is updated by the rule; the gradient of other segments is added.
        entry: Index of its (first) entry in the layout.
        factor: Factor of the learning rate.
        decayed: Whether ``decay_names`` matches.
    """

    start: int
    stop: int
    trained: bool
    entry: int
    factor: float
    decayed: bool

    def continues(self, other: Segment) -> bool:
        """Whether this segment of a group can be joined to the one before it, across the gap, which stays zero."""
        return (self.trained, self.decayed) == (other.trained, other.decayed)


class Group:
    """Segments that are updated together, in ascending order, with the options and constants that they share.

    Attributes:
        options: The optimizer with the options of the group.
        measured: The optimizer whose rule gives the direction of which norms are taken; None for the gradient.
        applied: The optimizer whose rule is applied last.
        factor: Factor of the learning rate; 1 for a layerwise optimizer, whose ``scales`` include the factors.
        adds_l2: Whether ``l2`` may differ from 0.
        segments: The segments, on the host.
        bounds: Shape (k, 3), int64: start, stop, and whether it is trained.
        entries: Shape (k,), int64: index of the segment's (first) entry in the layout.
        trained, decayed: Shape (k,), bool: as in ``Segment``.
        factors: Shape (k,), float64: factors of the learning rate.
        decay: Shape (k,), float64: weight decay where ``decay_names`` matches, else 0.
        scales, l2: Shape (k,), float64: arguments of ``update_segments``, which may be set at every step.
        sums: Shape (k, 2), float64: results of ``measure_segments``; a part of those of the range.
    """

    def __init__(self, options: Optimizer, segments: list[Segment], sums: Array, backend: Backend) -> None:
        self.options, self.segments, self.sums = options, segments, sums
        self.trust = trust = options.trust_ratio
        self.measured = options if trust is not None and trust.after_rule else None
        self.applied = options if self.measured is None else _ALONG_DIRECTION
        self.factor = segments[0].factor if trust is None else 1.0
        self.adds_l2 = bool(options.l2) or (trust is not None and not trust.after_rule)
        copy_of, decayed = backend.copy_of, np.array([segment.decayed for segment in segments])
        self.bounds = copy_of(np.array([segment[:3] for segment in segments], np.int64))
        self.entries = copy_of(np.array([segment.entry for segment in segments], np.int64))
        self.trained = copy_of(np.array([segment.trained for segment in segments]))
        self.factors = copy_of(np.array([segment.factor for segment in segments]))
        self.decayed, self.decay = copy_of(decayed), copy_of(options.weight_decay * decayed)
        self.scales, self.l2 = copy_of(np.ones(len(segments))), copy_of(options.l2 * decayed)


class Range:
    """The groups of a range of the vector.

    Attributes:
        groups: Groups, which differ in options or in the factor of the learning rate.
        sums: Shape (number of segments, 2), float64: the groups' ``sums``.
        clip: Clip factor that the groups' ``scales`` have; NaN if they have others.
    """

    def __init__(self, optimizer: Optimizer, layout: Layout, key: tuple[int, int, bytes], backend: Backend) -> None:
        groups = groups_of(optimizer, layout, *key)
        self.sums = backend.zeros((sum(len(segments) for _, segments in groups), 2), np.float64)
        self.groups, self.clip = list[Group](), 1.0
        first = 0
        for options, segments in groups:
            sums = self.sums[first : first + len(segments)]
            self.groups.append(Group(options, segments, sums, backend))
            first += len(segments)


def groups_of(
    optimizer: Optimizer, layout: Layout, lo: int, hi: int, frozen: bytes = b""
) -> list[tuple[Optimizer, list[Segment]]]:
    """Return the segments of [lo, hi) in groups of equal options; for a layerwise optimizer each entry is a segment.

    Args:
        frozen: For each entry whether it is not trained, although it is a parameter. Its gradient is zero.
    """
    variants: list[Optimizer] = []
    groups: dict[tuple[float, int], list[Segment]] = {}
    last: list[Segment] = []
    for index, entry in enumerate(layout.entries):
        start, stop = max(entry.start, lo), min(entry.stop, hi)
        if start >= stop:
            continue
        options, factor = optimizer.by_name(entry.name), optimizer.rate_factor(entry.name)
        if options not in variants:
            variants.append(options)
        trained = entry.kind == "param" and not (frozen and frozen[index])
        segment = Segment(start, stop, trained, index, factor, options.decays(entry.name))
        group = groups.setdefault((0.0 if optimizer.layerwise else factor, variants.index(options)), [])
        if group and group is last and not optimizer.layerwise and segment.continues(group[-1]):
            group[-1] = group[-1]._replace(stop=stop)
        else:
            group.append(segment)
        last = group
    return [(variants[variant], groups[factor, variant]) for factor, variant in sorted(groups)]


class Backend(Protocol):
    """The operations of an update on the vectors of a device.

    Attributes:
        xp: NumPy, or a module with the same interface.
        part: Maximum number of elements to which a rule without a compiled version is applied at a time.
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
        """Update the vectors with a compiled rule, as ``compiled.CompiledRule.update_segments`` does.

        Args:
            rate: Factor of the group's ``decay``.
        """

    def measure_segments(
        self, rule: CompiledRule | None, constants: Constants, group: Group, gradient: Gradient, own: Array
    ) -> None:
        """Write the gradient, or the direction of ``rule``, to ``own``; set the group's ``sums``."""

    def sum_rows(self, gradient: Gradient, start: int, stop: int, scale: Any, trained: bool) -> Array:
        """Return ``scale`` times elements [start, stop) of the gradient, in memory that the next call overwrites."""

    def number(self, values: Array, index: int) -> Any:
        """Return an element of an array as a factor of vectors, whose type it does not change."""

    def load(self, start: int, stop: int) -> Vectors:
        """Return a range of the vectors to be changed in place; ``store`` must follow."""

    def store(self, part: Vectors, start: int, stop: int) -> None:
        """Keep the changes of what ``load`` returned."""


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
        segments = group.bounds, group.scales, group.l2, group.decay
        changed = self._of_compiled_rules
        rule.update_segments(constants, *segments, rate, *gradient[:3], *changed, ema_weight, self._scratch)

    def measure_segments(
        self, rule: CompiledRule | None, constants: Constants, group: Group, gradient: Gradient, own: Array
    ) -> None:
        measure = compiled.measure_gradients if rule is None else rule.measure_segments
        segments = group.trust is not None, group.bounds, group.decay
        measure(constants, *segments, *gradient[:2], own, *self._of_compiled_rules[:3], group.sums, self._scratch)

    def sum_rows(self, gradient: Gradient, start: int, stop: int, scale: Any, trained: bool) -> Array:
        rows, order, origin, _ = gradient
        grads = self._scratch[: stop - start]
        sum_rows(rows, order, start - origin, stop - origin, scale, grads)
        return grads

    def number(self, values: Array, index: int) -> Any:
        return float(values[index])

    def load(self, start: int, stop: int) -> Vectors:
        return self._vectors.part(start, stop)

    def store(self, part: Vectors, start: int, stop: int) -> None:
        pass


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
        frozen: Parameters that do not change for now.
        backend: Operations on the vectors.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        params: Array,
        slots: Mapping[str, Array],
        average: Array | None = None,
        moving: moving_average | None = None,
        frozen: Frozen | None = None,
        backend: Callable[[Vectors], Backend] = CpuBackend,
    ) -> None:
        assert set(slots) == set(optimizer.slots) and (average is None) == (moving is None)
        self.optimizer = optimizer
        self.layout = layout
        self._moving, self._frozen = moving, frozen or Frozen(layout)
        average = params[:0] if average is None else average
        self._backend = backend(Vectors(params, average, {name: slots[name] for name in optimizer.slots}))
        self._first = self._in_order = self._backend.copy_of(np.zeros(1, np.int64))
        self._ranges: dict[tuple[int, int, bytes], Range] = {}

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
        of_range = self._range_of(lo, hi)
        if clip != of_range.clip:
            self._set_clip(of_range, clip)
            of_range.clip = clip
        self._apply(of_range, self._gradient(rows, order, origin), rate_scale, step)

    def update_all(self, grads: Array, step: int) -> None:
        """Update the whole vector with the gradient ``grads``, shape (size,), which may be overwritten."""
        size, rows = self.layout.size, grads.reshape(1, -1)
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
        of_range = self._range_of(lo, hi)
        gradient = self._gradient(rows, order)
        for group in of_range.groups:
            self._measure(group, gradient, own, step)
        if not self.optimizer.layerwise:
            return of_range.sums[:, 1].sum(keepdims=True)
        sums = self._backend.zeros((len(self.layout.entries), 2), np.float64)
        for group in of_range.groups:
            sums[group.entries] = group.sums
        return sums.reshape(-1)

    def finish(self, lo: int, hi: int, own: Array, sums: Array, step: int, *, rate_scale: float = 1.0) -> None:
        """Run the second half of an update: apply what ``prepare`` has written to own[lo:hi].

        Args:
            own: As passed to ``prepare``.
            sums: Results of ``prepare``, added over all ranges.
            rate_scale: As for ``update``.
        """
        of_range = self._range_of(lo, hi)
        of_range.clip = math.nan  # makes ``update`` set the scales again
        if self.optimizer.layerwise:
            by_entry = sums.reshape(-1, 2)
            clip = self.optimizer.clip_factor(by_entry[:, 1].sum())
            for group in of_range.groups:
                self._scale_layers(group, by_entry, clip, rate_scale * group.options.rate(step))
        else:
            self._set_clip(of_range, self.optimizer.clip_factor(sums[0]))
        self._apply(of_range, self._measured(own), rate_scale, step)

    def _set_clip(self, of_range: Range, clip: Any) -> None:
        for group in of_range.groups:
            self._backend.xp.copyto(group.scales, clip, where=group.trained)

    def _measure(self, group: Group, gradient: Gradient, own: Array, step: int) -> None:
        """Write the gradient, or the direction of the group's rule, to ``own``; set the group's ``sums``."""
        rule: CompiledRule | None = None
        constants: Constants = (0.0,)
        if group.measured is not None:
            fused = group.measured.fused(1.0, step)
            if fused is not None:
                rule, constants = fused
            else:
                self._write_directions(group, gradient, own, step)
                gradient = self._measured(own)
        self._backend.measure_segments(rule, constants, group, gradient, own)

    def _scale_layers(self, group: Group, sums: Array, clip: Any, rate: float) -> None:
        """Set the factors of a layerwise optimizer's segments; ``sums`` has shape (n_entries, 2)."""
        xp, trust = self._backend.xp, group.trust
        assert trust is not None
        xp.take(sums, group.entries, axis=0, out=group.sums)
        usable, ratios = trust.ratios(group.sums, group.decay, clip)
        scales = rate * group.factors
        xp.copyto(scales, scales * ratios, where=usable & group.decayed)
        if not trust.after_rule:  # otherwise the direction includes decay
            group.l2[...] = scales * group.decay
        xp.copyto(group.scales, clip * scales, where=group.trained)

    def _apply(self, of_range: Range, gradient: Gradient, rate_scale: float, step: int) -> None:
        ema_weight = 0.0 if self._moving is None else 1.0 - self._moving.decay_at(step)
        for group in of_range.groups:
            rate = decay_rate = rate_scale * group.options.rate(step) * group.factor
            if group.trust is not None:
                rate, decay_rate = 1.0, 0.0  # the scales include both
            fused = group.applied.fused(rate, step)
            if fused is None:
                self._apply_rule(group, rate, decay_rate, gradient, step, ema_weight)
            else:
                self._backend.update_segments(*fused, group, decay_rate, gradient, ema_weight)

    def _apply_rule(
        self, group: Group, rate: float, decay_rate: float, gradient: Gradient, step: int, ema_weight: float
    ) -> None:
        """Do what ``update_segments`` does, with a rule that is not compiled."""
        backend, update = self._backend, group.applied.update
        weight_decay = decay_rate * group.options.weight_decay
        for index, segment in enumerate(group.segments):
            scale, l2 = backend.number(group.scales, index), backend.number(group.l2, index)
            for start, stop in self._parts(segment):
                grads = backend.sum_rows(gradient, start, stop, scale, segment.trained)
                part = params, average, slots = backend.load(start, stop)
                if not segment.trained:
                    params += grads
                    average[...] = params[: average.size]
                else:
                    if segment.decayed and group.adds_l2:
                        grads += l2 * params
                    if segment.decayed and weight_decay:
                        params *= 1 - weight_decay
                    update(params, grads, slots, rate, step)
                    average += ema_weight * (params[: average.size] - average)
                backend.store(part, start, stop)

    def _write_directions(self, group: Group, gradient: Gradient, own: Array, step: int) -> None:
        """Write the directions of a rule that is not compiled to ``own``: its negative steps, plus decay."""
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
                own[start:stop] = grads

    def _parts(self, segment: Segment) -> Iterator[tuple[int, int]]:
        """Yield the segment in parts of the size that the backend works on at a time."""
        for start in range(segment.start, segment.stop, self._backend.part):
            yield start, min(start + self._backend.part, segment.stop)

    def _gradient(self, rows: Array, order: Array | None, origin: int = 0) -> Gradient:
        """Return the gradient of some rows, by default of all in order."""
        if order is None:
            if len(self._in_order) != len(rows):
                self._in_order = self._backend.copy_of(np.arange(len(rows)))
            order = self._in_order
        return Gradient(rows, order, origin)

    def _measured(self, own: Array) -> Gradient:
        """Return the gradient, or the direction, that ``prepare`` has written."""
        return Gradient(own.reshape(1, -1), self._first, measured=True)

    def _range_of(self, lo: int, hi: int) -> Range:
        """Return the groups of [lo, hi), cached by range and by what is frozen."""
        key = lo, hi, self._frozen.flags.tobytes()
        if key not in self._ranges:
            self._ranges[key] = Range(self.optimizer, self.layout, key, self._backend)
        return self._ranges[key]
