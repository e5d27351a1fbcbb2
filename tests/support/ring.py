"""Allreduce in rings, as Horovod and ChainerMN average gradients: not a mode, but for comparison with results of these
programs.

The gradients of consecutive layers are fused, and each fused buffer is summed by a ring over all P ranks. Every rank
sends 2 (P - 1) / P of the buffer, in 2 (P - 1) hops (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for
clusters of workstations, 2009). The buffers are sent one after the other, while the backward pass computes earlier
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """A ring through all ranks of all nodes.

    Attributes:
        nodes, ranks_per_node: The ranks; ranks of a node are neighbors.
        bytes_per_s: Bandwidth of the link of a node.
        hop_s, network_hop_s: Latency of a hop within a node, and between nodes.
    """

    nodes: int
    ranks_per_node: int
    bytes_per_s: float
    hop_s: float
    network_hop_s: float

    def allreduce_s(self, nbytes: float) -> float:
        """Return the seconds to sum this number of bytes."""
        ranks = self.nodes * self.ranks_per_node
        hops_s = 2 * (ranks - self.nodes) * self.hop_s + 2 * (self.nodes - 1) * self.network_hop_s
        return hops_s + 2 * (ranks - 1) / ranks * nbytes / self.bytes_per_s


@dataclass(frozen=True)
class FusedBuffer:
    """Gradients that are summed together; ``ready_s``: the time when they are final, from the step's beginning."""

    nbytes: float
    ready_s: float


def fuse(layers: Sequence[tuple[float, float]], forward_s: float, backward_s: float, most: float) -> list[FusedBuffer]:
    """Return the fused buffers of a model, in the order in which they are ready.

    Args:
        layers: Bytes and share of the operations of each layer, from input to output.
        most: The largest size of a buffer of several layers.
    """
    buffers: list[FusedBuffer] = []
    done, pending, ready_s = 0.0, 0.0, forward_s
    total = sum(share for _, share in layers)
    for nbytes, share in reversed(layers):
        if pending and pending + nbytes > most:
            buffers.append(FusedBuffer(pending, ready_s))
            pending = 0.0
        done += share / total
        pending, ready_s = pending + nbytes, forward_s + backward_s * done
    return [*buffers, FusedBuffer(pending, ready_s)]


def step_s(buffers: Sequence[FusedBuffer], computed_s: float, ring: Ring, factor: float = 1.0) -> float:
    """Return the seconds of a step that computes for ``computed_s``, and sums all buffers.

    Args:
        factor: Factor of the computing time of the slowest rank, for which all ranks wait.
    """
    now = 0.0
    for buffer in buffers:
        now = max(now, factor * buffer.ready_s) + ring.allreduce_s(buffer.nbytes)
    return max(now, factor * computed_s)
