"""Ranks 0 and 1 read checkpoints, rank 2 holds no vectors; only one rank finds that the newest checkpoint is damaged.

    falling_back.py FOLDER RANK

On RANK, reading the newest file sets values before its digest turns out to be wrong. Prints the result of rank 0.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from mpitrain import checkpoint
from mpitrain.checkpoint.resume import plan_resume
from mpitrain.comm.cluster import Cluster
from mpitrain.core.extra_state import Versioned
from mpitrain.core.layout import Layout
from mpitrain.errors import DamagedCheckpoint
from mpitrain.plan.config import RunConfig
from mpitrain.plan.progress import Progress
from mpitrain.training.restore import restore

cluster, folder, where = Cluster(), Path(sys.argv[1]), int(sys.argv[2])
layout = Layout.pack([("a", (99, 3), "param"), ("b", (5,), "state")])
names = ("params", "momentum")
if cluster.rank == 0:
    for step in (1, 2, 3):
        extra_state = {"loss_scale": Versioned(1, {"scale": step + 0.5})}
        state = {name: np.full(layout.size, step, np.float32) for name in names}
        snapshot = checkpoint.Snapshot(state, step, 10 * step, extra_state)
        checkpoint.write(checkpoint.path_for(folder, step), layout, snapshot, 0, {})
cluster.comm.Barrier()
read = checkpoint.read


def read_badly(path, layout, vectors, seed):
    reached = read(path, layout, vectors, seed)
    if reached.progress.step == 3 and cluster.rank == where:
        for vector in vectors.values():
            vector[:] = np.nan
        raise DamagedCheckpoint(f"{path} is not a whole checkpoint")
    return reached


checkpoint.read = read_badly
begin = plan_resume(RunConfig(), folder, layout)
begun: list[Progress] = []
plan = SimpleNamespace(layout=layout, config=RunConfig(), length=SimpleNamespace(begin=begun.append))
vectors = {name: np.full(layout.size, np.nan, np.float32) for name in names} if cluster.rank < 2 else None
start = restore(cluster, plan, None, begin, vectors)  # type: ignore[arg-type]
checkpoint.read = read
assert begun == [start.progress]
if vectors is not None:
    views = layout.views(vectors["params"]), layout.views(vectors["momentum"])
    assert all((view == 2).all() for view in [*views[0].values(), views[1]["a"]])
    assert not views[1]["b"].any()  # layer state has no slots
everywhere = cluster.comm.allgather(start)
assert everywhere == [everywhere[0]] * cluster.size
if cluster.rank == 0:
    scale = start.extra_state["loss_scale"].values["scale"]
    print(f"{start.progress.step} {start.progress.data_cursor} {scale}", start.resumed, *start.skipped, sep="\n")
cluster.node.Free()
cluster.comm.Free()
