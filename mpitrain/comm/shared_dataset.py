"""One copy of a data set per node, shared by the node's ranks."""

from __future__ import annotations

from ..core.host_memory import available_bytes
from ..data import InMemory, Split, Storage, Streaming
from ..data.loader import Check
from .cluster import Group
from .shared_memory import SharedArrays, sharing_problem

_RESIDENT_PART = 0.5  # fraction of the node's free memory; a split that needs more is streamed from its file


class SharedDataset:
    """Loads splits into memory shared by a node's ranks.

    Every method is collective over the group's ranks.

    Args:
        share: Whether the ranks of a node share one copy of the data.
        threads: Number of threads with which each rank copies the examples of a large batch.
    """

    def __init__(self, group: Group, share: bool, threads: int = 1) -> None:
        self._group = group
        self._share, self._threads = share, threads
        self._shared = SharedArrays(group.node)

    def load(self, split: Split, check: Check | None = None) -> Storage:
        """Return storage of ``split``, shared by the node, or one per rank if memory cannot be shared.

        A split that needs more than half of the node's free memory is streamed, if its file can be read in ranges.

        Args:
            check: See ``Streaming``; checks all examples now, unless they are streamed.

        Raises:
            DataError: On every rank, if a rank cannot read its file, the values are not valid, or the order cannot be
                streamed.
        """
        group = self._group
        share = self._share and not any(group.comm.allgather(sharing_problem(group.node, split.nbytes)))
        needed = split.nbytes * (1 if share else group.node.size)
        if split.block is not None and any(group.comm.allgather(needed > _RESIDENT_PART * available_bytes())):
            with group.agree("reading data"):
                split.check_streamed()
            return Streaming(split, check)
        arrays = self._shared if share else SharedArrays(group.self_comm)
        examples = arrays.allocate((len(split), *split.shape), split.dtype)
        labels = arrays.allocate((len(split), *split.label_shape), split.label_dtype)
        with group.agree("reading data"):
            if not share or group.node.rank == 0:
                split.read(0, len(split), examples, labels)
                if check is not None:
                    check(examples, labels, 0)
        split.release()
        return InMemory(examples, labels, self._threads)

    def free(self) -> None:
        """Free the memory; no storage may be read afterwards."""
        self._shared.free()
