"""Every rank is a node that writes its part of checkpoints; one of them cannot write its part of step 2.

Prints the chief's message and the steps of the checkpoints. Nodes are simulated: all are on this host.
"""

from __future__ import annotations

import errno
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from mpitrain import checkpoint
from mpitrain.comm.cluster import Cluster, Group
from mpitrain.comm.mpi import MPI
from mpitrain.core.layout import Layout
from mpitrain.plan.config import RunConfig
from mpitrain.training.checkpointing import ShardedCheckpoints, sharded_checkpoints

cluster, folder, background = Cluster(), Path(sys.argv[1]), sys.argv[2] == "background"
group = Group(cluster.comm, MPI.Intracomm(MPI.COMM_SELF), f"node{cluster.rank}", cluster.rank_description)
layout = Layout.pack([("a", (99, 3), "param")])
plan = SimpleNamespace(config=RunConfig.of(save_background=background), layout=layout)
logging.basicConfig(stream=sys.stdout if cluster.chief else sys.stderr, format="%(message)s")
checkpoints = sharded_checkpoints(group, plan, folder, {})  # type: ignore[arg-type]
assert isinstance(checkpoints, ShardedCheckpoints)
write = checkpoints._writer._write


def fail_at_two(snapshot):
    if snapshot.step == 2 and cluster.rank == 1:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    write(snapshot)


checkpoints._writer._write = fail_at_two
for step in (1, 2, 3):
    checkpoints.save(checkpoint.Snapshot({"params": np.full(layout.size, step, np.float32)}, step, step))
    for _ in range(100):  # steps of training
        checkpoints.progress()
        cluster.comm.Barrier()  # no rank may wait in ``progress`` for a rank that waits here
        time.sleep(1e-3)
checkpoints.close()
assert checkpoints.failure is None
if cluster.chief:
    print([*checkpoint.steps(folder)])
    for path in checkpoint.steps(folder).values():
        checkpoint.verify(path)
cluster.node.Free()
cluster.comm.Free()
