"""Checkpoints by several nodes: one shard per node, against one shared file.

    mpirun -n 2 python bench/shared_file.py [--rounds 5] [--mib 512] [--folder DIR]

Every rank acts as one node, and all write to the same disk. Each round does both, alternating. A result is the median
over rounds of the seconds from the start on all ranks until the checkpoint has its final name.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from mpitrain import checkpoint
from mpitrain.checkpoint.sharded import ShardedWriter, ShardSpec
from mpitrain.checkpoint.shared_file import SharedFileWriter
from mpitrain.comm.cluster import Cluster, Group
from mpitrain.comm.mpi import MPI
from mpitrain.comm.node_leaders import NodeLeaders
from mpitrain.core.layout import Layout

LAYERS = 32
VECTORS = ("params", "mean", "square")


def layout_of(mib: int) -> Layout:
    side = int((mib * 2**20 / 4 / len(VECTORS) / LAYERS) ** 0.5)
    return Layout.pack([(f"dense{i}.weight", (side, side), "param") for i in range(LAYERS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure  [default: a temporary folder]")
    arguments = parser.parse_args()
    cluster = Cluster()
    leaders = NodeLeaders(Group(cluster.comm, MPI.Intracomm(MPI.COMM_SELF), "", ""))
    layout = layout_of(arguments.mib)
    rng = np.random.default_rng(cluster.rank)
    vectors = {name: rng.standard_normal(layout.size, np.float32) for name in VECTORS}
    gib = sum(vector.nbytes for vector in vectors.values()) / 2**30
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(cluster.comm.bcast(temporary, root=0))
        writers = {
            "one shard per node": ShardedWriter(
                folder, layout, 0, {}, "none", ShardSpec(leaders.rank, leaders.size, "0a")
            ),
            "one shared file": SharedFileWriter(folder, layout, 0, {}, leaders),
        }
        for _ in range(arguments.rounds):
            for name, writer in writers.items():
                if cluster.rank == 0:
                    for path in folder.iterdir():
                        path.unlink()
                cluster.comm.Barrier()
                began = time.perf_counter()
                writer.write(checkpoint.Snapshot(vectors, 5, 0))
                cluster.comm.Barrier()
                if cluster.rank == 0:
                    writer.write_index()
                times[name].append(time.perf_counter() - began)
        if cluster.rank == 0:
            checkpoint.verify(checkpoint.path_for(folder, 5))
        cluster.comm.Barrier()
    for name, seconds in times.items() if cluster.rank == 0 else ():
        median = statistics.median(seconds)
        print(f"{name:18} {median:6.3f} s  {gib / median:6.2f} GiB/s  ({min(seconds):.3f} to {max(seconds):.3f} s)")


if __name__ == "__main__":
    main()
