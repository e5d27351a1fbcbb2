"""One copy of a data set for each node, however many ranks the node has."""

from __future__ import annotations

from pathlib import Path

from ..data import InMemory, Split, Storage, Streaming, check_labels
from .cluster import Group
from .shared_memory import SharedArrays, sharing_problem

_RESIDENT_PART = 0.5  # of the node's free memory: a split that needs more is read from its file as it is used


class SharedDataset:
    """Loads splits into the memory that a node's ranks share.

    Every method is collective over the group's ranks.
    """

    def __init__(self, group: Group, share: bool) -> None:
        self._group = group
        self._share = share
        self._shared = SharedArrays(group.node)

    def load(self, split: Split) -> Storage:
        """Storage of ``split``: shared by the node, or each rank's own where memory cannot be shared.

        A split larger than half of the node's free memory stays in its file, where that can be read in slices.

        Raises:
            DataError: On every rank, where one cannot read its file.
        """
        group = self._group
        share = self._share and not any(group.comm.allgather(sharing_problem(group.node, split.nbytes)))
        needed = split.nbytes * (1 if share else group.node.size)
        if split.block is not None and any(group.comm.allgather(needed > _RESIDENT_PART * _free_bytes())):
            return Streaming(split)
        arrays = self._shared if share else SharedArrays(group.self_comm)
        examples = arrays.allocate((len(split), *split.shape), split.dtype)
        labels = arrays.allocate((len(split), *split.label_shape), split.label_dtype)
        with group.agree("reading data"):
            if not share or group.node.rank == 0:
                split.read(0, len(split), examples, labels)
                check_labels(split, labels)
        return InMemory(examples, labels)

    def free(self) -> None:
        """Give the memory back; no storage may be read after that."""
        self._shared.free()


def _free_bytes() -> int:
    """Memory that this node can still give out, or that the limit of our control group leaves."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))
