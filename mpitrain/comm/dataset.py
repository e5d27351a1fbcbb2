"""One copy of a data set for each node, however many ranks the node has."""

from __future__ import annotations

import os

from ..cluster import Cluster
from ..data import Resident, Split, Storage, Streaming, check_labels
from .shared import SharedArrays, sharing_problem

_RESIDENT_PART = 0.5  # of the node's free memory: a split that needs more is read from its file as it is used


class SharedData:
    """Loads splits into the memory that a node's ranks share.

    Every method is collective over the cluster's ranks.
    """

    def __init__(self, cluster: Cluster, share: bool) -> None:
        self._cluster = cluster
        self._share = share
        self._shared = SharedArrays(cluster.node)

    def load(self, split: Split) -> Storage:
        """Storage of ``split``: shared by the node, or each rank's own where memory cannot be shared.

        A split larger than half of the node's free memory stays in its file, where that can be read in slices.

        Raises:
            DataError: On every rank, where one cannot read its file.
        """
        cluster = self._cluster
        large = split.nbytes > _RESIDENT_PART * _free_bytes()
        if cluster.comm.allreduce(large) and split.block is not None:
            return Streaming(split)
        share = self._share and not any(cluster.comm.allgather(sharing_problem(cluster.node, split.nbytes)))
        arrays = self._shared if share else SharedArrays(cluster.alone)
        examples = arrays.allocate((len(split), *split.shape), split.dtype)
        labels = arrays.allocate((len(split), *split.label_shape), split.label_dtype)
        with cluster.agree("reading data"):
            if not share or cluster.node.rank == 0:
                split.read(0, len(split), examples, labels)
                check_labels(split, labels)
        return Resident(examples, labels)

    def free(self) -> None:
        """Give the memory back; no storage may be read after that."""
        self._shared.free()


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
