"""Groups of segments: which options of an optimizer apply to which part of the vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..core.layout import Array, Layout
from .optimizer import Optimizer
from .rules import sgd

_ALONG_DIRECTION = sgd(1.0)  # the rule of a step along a direction that was measured

Key = tuple[int, int, bytes]  # range [lo, hi), and for each entry whether it is frozen
CopyOf = Callable[[Array], Array]  # copies an array of the host to the device


class Segment(NamedTuple):
    """A part of the vector whose elements have the same options.

    Attributes:
        start, stop: Its elements.
        trained: Whether the rule updates the segment.
        added: Whether the gradient is added to the segment, as for state. Frozen parameters are neither trained nor
            added.
        entry: Index of its (first) entry in the layout.
        factor: Factor of the learning rate.
        decayed: Whether ``decay_names`` matches.
    """

    start: int
    stop: int
    trained: bool
    added: bool
    entry: int
    factor: float
    decayed: bool

    def continues(self, other: Segment) -> bool:
        """Return whether this segment can be joined to the previous segment, across the gap, which stays zero."""
        return self[2:4] == other[2:4] and self.decayed == other.decayed


class Group:
    """Segments that are updated together, in ascending order, with the options and constants that they share.

    Attributes:
        options: The optimizer with the options of the group.
        measured: If norms of a direction are measured, the optimizer with its rule; None to measure the gradient.
        applied: The optimizer whose rule is applied last.
        factor: Factor of the learning rate; 1 for a layerwise optimizer, whose ``scales`` include the factors.
        adds_l2: Whether ``l2`` may differ from 0.
        segments: The segments, on the host.
        bounds: Shape (k, 3), int64: start, stop, and whether the segment is trained.
        entries: Shape (k,), int64: index of the segment's (first) entry in the layout.
        trained, decayed: Shape (k,), bool: as in ``Segment``.
        factors: Shape (k,), float64: factors of the learning rate.
        decay: Shape (k,), float64: weight decay where ``decay_names`` matches, else 0.
        scales, l2: Shape (k,), float64: arguments of ``update_segments``, which may be set at every step for trained
            segments; those of frozen parameters are 0.
        sums: Shape (k, 2), float64: results of ``measure_segments``; a view of the range's ``sums``.
    """

    def __init__(self, options: Optimizer, segments: list[Segment], sums: Array, copy_of: CopyOf) -> None:
        self.options, self.segments, self.sums = options, segments, sums
        self.trust = trust = options.trust_ratio
        self.measured = options if trust is not None and trust.after_rule else None
        self.applied = options if self.measured is None else _ALONG_DIRECTION
        self.factor = segments[0].factor if trust is None else 1.0
        self.adds_l2 = bool(options.l2) or (trust is not None and not trust.after_rule)
        decayed = np.array([segment.decayed for segment in segments])
        self.bounds = copy_of(np.array([segment[:3] for segment in segments], np.int64))
        self.entries = copy_of(np.array([segment.entry for segment in segments], np.int64))
        self.trained = copy_of(np.array([segment.trained for segment in segments]))
        self.factors = copy_of(np.array([segment.factor for segment in segments]))
        self.decayed, self.decay = copy_of(decayed), copy_of(options.weight_decay * decayed)
        scales = [float(segment.trained or segment.added) for segment in segments]
        self.scales, self.l2 = copy_of(np.array(scales)), copy_of(options.l2 * decayed)


class Range:
    """The groups of a range of the vector.

    Args:
        has_average: Whether there is a moving average, into which frozen parameters are copied.

    Attributes:
        groups: Groups, which differ in options or in the factor of the learning rate.
        sums: Shape (number of segments, 2), float64: the groups' ``sums``.
        clip: The clip factor in the groups' ``scales``; NaN if these have other factors.
    """

    def __init__(
        self, optimizer: Optimizer, layout: Layout, key: Key, copy_of: CopyOf, has_average: bool = True
    ) -> None:
        groups = groups_of(optimizer, layout, *key, has_average)
        self.sums = copy_of(np.zeros((sum(len(segments) for _, segments in groups), 2)))
        self.groups, self.clip = list[Group](), 1.0
        first = 0
        for options, segments in groups:
            sums = self.sums[first : first + len(segments)]
            self.groups.append(Group(options, segments, sums, copy_of))
            first += len(segments)


def groups_of(
    optimizer: Optimizer, layout: Layout, lo: int, hi: int, frozen: bytes = b"", has_average: bool = True
) -> list[tuple[Optimizer, list[Segment]]]:
    """Return the segments of [lo, hi) in groups of equal options; for a layerwise optimizer each entry is a segment.

    Args:
        frozen: For each entry whether it is not trained, although it is a parameter.
        has_average: Whether there is a moving average; else frozen parameters are in no group.
    """
    variants: list[Optimizer] = []
    groups: dict[tuple[float, int], list[Segment]] = {}
    last: list[Segment] = []
    for index, entry in enumerate(layout.entries):
        start, stop = max(entry.start, lo), min(entry.stop, hi)
        is_frozen = bool(frozen) and bool(frozen[index])
        if start >= stop:
            continue
        if is_frozen and not has_average:
            last = []  # nothing is joined across it
            continue
        of_entry = optimizer.by_name(entry.name)
        factor, options = of_entry.rate_factor, replace(of_entry, rate_factor=1.0)
        if options not in variants:
            variants.append(options)
        trained = entry.kind == "param" and not is_frozen
        segment = Segment(start, stop, trained, entry.kind == "state", index, factor, options.decays(entry.name))
        group = groups.setdefault((0.0 if optimizer.layerwise else factor, variants.index(options)), [])
        if group and group is last and not optimizer.layerwise and segment.continues(group[-1]):
            group[-1] = group[-1]._replace(stop=stop)
        else:
            group.append(segment)
        last = group
    return [(variants[variant], groups[factor, variant]) for factor, variant in sorted(groups)]
