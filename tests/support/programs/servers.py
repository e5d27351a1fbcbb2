"""Run on every rank: shards, step coordinator and requests, without a model. Prints ``ok`` on the first worker.

    servers.py WHAT MODE SERVERS STEPS SHARE ONE_SIDED

WHAT is ``pushes`` or ``torn``. In both cases, workers push gradients of -1 for SGD with learning rate 1, so that each
parameter is the number of pushes. With ``torn``, one worker also reads between its pushes.
"""

from __future__ import annotations

import sys

import numpy as np

from mpitrain.comm.cluster import Cluster
from mpitrain.core.device import CPU
from mpitrain.core.layout import Layout
from mpitrain.core.training_state import TrainingState
from mpitrain.optim import sgd
from mpitrain.optim.schedule import EpochCounter
from mpitrain.plan.config import RunConfig
from mpitrain.plan.placement import assign_servers, ranges_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.progress import ConsistentPoint, Progress, RunLength
from mpitrain.strategy.ps.asynchronous import Async, AsyncStore
from mpitrain.strategy.ps.backup import BackupStore, strategy_of
from mpitrain.strategy.ps.backup_server import make_server
from mpitrain.strategy.ps.server import Server

what, mode, servers, count, share, one_sided = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])

LAYOUT = Layout.pack([("a", (301,), "param"), ("b", (7, 3), "param"), ("c", (64,), "param")])
config = RunConfig.of(
    mode=mode,
    ps=servers,
    batch_size=1,
    dtype="float64",
    train_steps=count,
    shared_memory=bool(share),
    one_sided=bool(one_sided),
    backup_workers=0 if mode == "backup" else None,
    staleness=2 if mode == "ssp" else None,
)
cluster = Cluster()
cluster.assign(config)
workers = len(cluster.worker_ranks)
pieces = assign_servers(LAYOUT, max(1, servers), "partitioned", 8)
plan = Plan(
    config=config,
    layout=LAYOUT,
    optimizer=sgd(1.0),
    moving_average=None,
    layer_starts=[0],
    placements=pieces,
    workers=workers,
    length=RunLength(EpochCounter(1, 1), config.training.train_steps, None, True),
)


state = TrainingState(LAYOUT)
store = (BackupStore if mode == "backup" else AsyncStore)(cluster, plan, state)
if store.initial_vectors is not None:
    store.initial_vectors["params"][:] = 0
used = np.concatenate([np.arange(e.start, e.stop) for e in LAYOUT.entries])


def train() -> None:
    strategy = strategy_of(store, state) if isinstance(store, BackupStore) else Async(store, [CPU], state)
    strategy.start(Progress(0, 0), {})
    strategy.grads[used] = -1.0
    steps = 0
    while (work := strategy.next()) is not None:
        if isinstance(work, ConsistentPoint):
            assert work == (count, count * plan.gradients_per_step, frozenset(), True)
            continue
        check_read(strategy.params)
        if what == "torn" and cluster.task_index == 0:
            for _ in range(20):  # reads between two pushes of this worker
                strategy.read_params(0)
                check_read(strategy.params)
        strategy.begin(0.0)
        strategy.ready(0)
        strategy.finish()
        steps += 1
    pushed = cluster.workers.allreduce(steps)
    assert pushed == count * plan.gradients_per_step, (pushed, count)
    assert (strategy.params[used] == pushed).all(), (strategy.params[used].min(), strategy.params[used].max(), pushed)
    coordinator = strategy.coordinator.state()
    assert coordinator.done == count
    assert sum(account.steps for account in coordinator.worker_stats) == pushed
    if mode == "ssp":
        assert max(account.staleness_max for account in coordinator.worker_stats) <= 2
    assert sum(sum(account.histogram) for account in coordinator.worker_stats) == pushed
    if cluster.chief:
        print("ok")


def check_read(params) -> None:
    """Check that all parameters of a server are equal: each is the number of pushes that have reached the server."""
    for server in range(plan.n_servers):
        for lo, hi in ranges_of(pieces, server, LAYOUT):
            found = params[np.intersect1d(np.arange(lo, hi), used)]
            assert (found == found[0]).all(), (server, found.min(), found.max())


if cluster.is_server:
    store.start(Progress(0, 0))
    server = make_server(store) if isinstance(store, BackupStore) else Server(store)
    server.serve()
else:
    train()
    if cluster.servers:
        cluster.comm.Ibarrier().Wait()
store.free()
for group in dict.fromkeys([cluster.training, cluster]):  # one group, if there are no servers
    group.node.Free()
    group.comm.Free()
