"""Every rank is a node that writes its share of one file. At step 2, one node or all nodes cannot write.

    together.py FOLDER background|waiting limit|files|full

- ``limit``: one node's limit of file sizes is below the end of its share.
- ``files``: the node may open no file.
- ``full``: the disk has too little room.

Prints the chief's message and the names of the files. Nodes are simulated on this host.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from mpitrain import checkpoint
from mpitrain.checkpoint.shared_file import SharedFileWriter
from mpitrain.comm.cluster import Cluster, Group
from mpitrain.comm.mpi import MPI
from mpitrain.plan.config import RunConfig
from mpitrain.training.checkpointing import ShardedCheckpoints, sharded_checkpoints
from tests.support.saved_state import LAYOUT, extra_state, state

OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


def refuse(cluster: Cluster, folder: Path, how: str) -> None:
    """Make writing fail in the way ``how``; if ``how`` is empty, undo this."""
    if how == "full":
        if cluster.chief:
            with (folder / "filler").open("wb") as filler:
                free = os.statvfs(folder)
                filler.write(bytes(free.f_bavail * free.f_frsize - 50_000))
        cluster.comm.Barrier()
    elif cluster.rank == 1:
        unlimited = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (80_000 if how == "limit" else unlimited, unlimited))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, OPEN_FILES[1]) if how == "files" else OPEN_FILES)


def main() -> None:
    cluster, folder, background, how = Cluster(), Path(sys.argv[1]), sys.argv[2] == "background", sys.argv[3]
    group = Group(cluster.comm, MPI.Intracomm(MPI.COMM_SELF), f"node{cluster.rank}", cluster.rank_description)
    plan = SimpleNamespace(config=RunConfig.of(save_background=background, save_one_file=True), layout=LAYOUT)
    logging.basicConfig(stream=sys.stdout if cluster.chief else sys.stderr, format="%(message)s")
    checkpoints = sharded_checkpoints(group, plan, folder, {"mode": "sync"})  # type: ignore[arg-type]
    assert isinstance(checkpoints, ShardedCheckpoints) and isinstance(checkpoints._shards, SharedFileWriter)
    for step in (1, 2, 3):
        checkpoints._finish()
        if step == 2:
            refuse(cluster, folder, how)
        if step == 3:
            refuse(cluster, folder, "")
            (folder / "filler").unlink(missing_ok=True)
        cluster.comm.Barrier()
        checkpoints.save(checkpoint.Snapshot(state(step), step, 2 * step, extra_state(step)))
        for _ in range(30):  # steps of training
            checkpoints.progress()
            cluster.comm.Barrier()  # no rank may wait in ``progress`` for a rank that waits here
            time.sleep(1e-3)
    checkpoints.close()
    assert checkpoints.failure is None
    if cluster.chief:
        print(sorted(os.listdir(folder)))
    cluster.node.Free()
    cluster.comm.Free()


if __name__ == "__main__":
    main()
