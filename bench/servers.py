"""Throughput for different numbers of servers: pushes and pulls of a model of 64 MiB, without computation.

    python bench/servers.py [--mib 64] [--workers 2] [--steps 24] [--rounds 3]

In ``async`` every worker reads all parameters and pushes a constant gradient, applied by plain SGD. Runs use one host
with shared memory, or treat each rank as a separate node (``between nodes``), so that all data goes through MPI.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path


def run_rank(mib: float, servers: int, steps: int, share: bool) -> None:
    """Run one rank; the first worker prints the seconds per step."""
    import numpy as np

    from mpitrain.comm.cluster import Cluster
    from mpitrain.core.device import CPU
    from mpitrain.core.layout import Layout
    from mpitrain.core.training_state import TrainingState
    from mpitrain.optim import sgd
    from mpitrain.optim.schedule import EpochCounter
    from mpitrain.plan.config import RunConfig
    from mpitrain.plan.placement import assign_servers
    from mpitrain.plan.plan import Plan
    from mpitrain.plan.progress import ConsistentPoint, Progress, RunLength
    from mpitrain.strategy.ps.asynchronous import Async, AsyncStore
    from mpitrain.strategy.ps.server import Server

    layout = Layout.pack([("weight", (int(mib * (1 << 18)),), "param")])
    config = RunConfig.of(mode="async", ps=servers, batch_size=1, train_steps=steps, shared_memory=share)
    cluster = Cluster()
    cluster.assign(config)
    dtype = np.dtype(np.float32)
    plan = Plan(
        config=config,
        layout=layout,
        optimizer=sgd(0.1),
        moving_average=None,
        layer_starts=[0],
        placements=assign_servers(layout, servers, "partitioned", dtype.itemsize),
        workers=len(cluster.worker_ranks),
        length=RunLength(EpochCounter(1, 1), steps, None, True),
        validate_steps=len(cluster.worker_ranks),  # a pause after each worker's first step, which touches all memory
    )

    state = TrainingState(layout)
    store = AsyncStore(cluster, plan, state)
    if store.initial_vectors is not None:
        store.initial_vectors["params"][:] = 0
    if cluster.is_server:
        store.start(Progress(0, 0))
        Server(store).serve()
    else:
        strategy = Async(store, [CPU], state)
        strategy.start(Progress(0, 0), {})
        strategy.grads[:] = 1
        began = 0.0
        while (work := strategy.next()) is not None:
            if isinstance(work, ConsistentPoint):
                began = began or time.perf_counter()
                continue
            strategy.begin(0.0)
            strategy.finish()
        if cluster.chief:
            print((time.perf_counter() - began) / (steps - cluster.workers.size))
        cluster.comm.Ibarrier().Wait()
    store.free()


def seconds(arguments: argparse.Namespace, servers: int, share: bool) -> float:
    mpirun = str(Path(sys.executable).parent / "mpirun")
    ranks = str(arguments.workers + servers)
    words = [mpirun, "-n", ranks, "--oversubscribe", "--bind-to", "none", sys.executable, __file__, "--rank"]
    words += [str(servers), "--mib", str(arguments.mib), "--steps", str(arguments.steps)]
    words += ["--share"] if share else []
    environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"OMPI_MCA_mpi_yield_when_idle": "1"}
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=64.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--share", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(arguments.mib, arguments.rank, arguments.steps, arguments.share)
        return
    figures: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for share in (True, False):
            for servers in (1, 2, 4):
                figures[share, servers].append(seconds(arguments, servers, share))
    print(f"{arguments.workers} workers, {arguments.mib:g} MiB; one step is a pull and a push of one worker")
    for share in (True, False):
        one = statistics.median(figures[share, 1])
        for servers in (1, 2, 4):
            took = statistics.median(figures[share, servers])
            rate = 2 * arguments.mib / 1024 / took
            where = "shared memory" if share else "between nodes"
            print(
                f"{where}  {servers} server{'s' * (servers > 1):1}  {1 / took:7.1f} steps/s  {rate:6.2f} GiB/s"
                f"  {one / took:5.2f} x one server"
            )


if __name__ == "__main__":
    main()
