"""The effect of ``--compress`` between nodes, in the modes without servers."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..comm.hierarchy import Hierarchy
from ..comm.powersgd import compresses_any
from ..comm.vector_codec import VectorCodec, make_vector_codec
from ..core.ranges import Range
from ..plan.plan import Plan

_log = logging.getLogger(__name__)


def make_node_codec(plan: Plan, hierarchy: Hierarchy, buckets: Iterable[Range]) -> VectorCodec | None:
    """Return the codec for vectors between nodes; None if there is one node, no compression, or PowerSGD.

    Prints a notice if ``--compress`` has no effect. Collective over the workers. A run that begins to compress later
    also calls it at the start, so that errors of a codec are detected early.

    Args:
        buckets: Ranges of the flat vector; each is exchanged as a whole.
    """
    compression = plan.config.compression
    if compression is None:
        return None
    if why := _why_unused(plan, hierarchy):
        _log.info("--compress %s has no effect: %s", compression, why)
    if compression.rank or hierarchy.n_nodes == 1:
        return None
    counts = {hi - lo for bucket in buckets for lo, hi in hierarchy.owned_ranges(*bucket)}
    return make_vector_codec(compression, plan.dtype, plan.layout, hierarchy.comm, counts)


def _why_unused(plan: Plan, hierarchy: Hierarchy) -> str:
    """Return why ``--compress`` has no effect; empty if it has an effect."""
    compression, first = plan.config.compression, plan.config.parallel.compress_after
    if hierarchy.n_nodes == 1:
        return "all workers are on one node"
    if first >= plan.train_steps:
        return f"training ends at step {plan.train_steps:,}, and --compress-after is {first:,}"
    if compression is not None and compression.rank and not compresses_any(plan.layout, compression.rank):
        return "it reduces no parameter to half its size; use a smaller rank"
    return ""
