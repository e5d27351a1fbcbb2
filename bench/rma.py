"""A worker's push and pull of parameters, against a plain MPI_Put of the same bytes in both directions.

    python bench/rma.py [--mib 4] [--rounds 5] [--hosts] [--rate 1gbit]

By default both ranks are on one host. The worker reads and updates (plain SGD) a shard in shared memory, and for
comparison uses the RPC transports that connect nodes. ``--hosts`` (root, iproute2) puts the ranks in two network
namespaces joined by a bridge, where only the RPC transports work; ``--rate`` limits each host's link. A push ends when
the server has the gradient, which only shared memory applies here; a pull returns parameters. ``bf16`` pushes half the
bytes, with error feedback. All variants alternate in one run; results are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

PUSH, PULL, STOP = 1, 2, 3


def measure(mib: float, rounds: int) -> None:
    """Run one of the two ranks: rank 0 is the server, rank 1 the worker."""
    import numpy as np

    from mpitrain.comm.backoff import Backoff
    from mpitrain.comm.compression import make_codec
    from mpitrain.comm.mpi import MPI, start
    from mpitrain.comm.rpc import Routes
    from mpitrain.comm.rpc.messages import MessageClient, MessageServer
    from mpitrain.comm.rpc.windows import WindowClient, WindowServer
    from mpitrain.comm.shared_memory import SharedArrays
    from mpitrain.comm.vector_codec import VectorCodec
    from mpitrain.core.layout import Layout
    from mpitrain.optim import Updater, sgd
    from mpitrain.plan.compression import Compression
    from mpitrain.strategy.ps.shard import Push, Shard

    comm = start()
    alone = "--hosts" not in sys.argv
    size = int(mib * (1 << 20)) // 4
    routes = Routes(comm, {0: [1]}, {0: [(0, size)]}, size, np.dtype(np.float32), 8)
    grads = np.ones(size, np.float32)
    bfloat16 = VectorCodec(make_codec(Compression("bfloat16"), routes.dtype), np.zeros(0, np.int64))
    halved = replace(routes, codec=bfloat16)
    times: dict[str, list[float]] = {"put": [], "window": [], "message": [], "window, bf16": []}
    if alone:
        times["shared memory"] = []
        shared = SharedArrays(comm)
        params = shared.allocate((size,), np.float32)
        layout = Layout.pack([("weight", (size,), "param")])
        updater = Updater(sgd(0.1), layout, params, {})
        frozen, waiting = np.zeros(1, np.uint8), Backoff(oversubscribed=False)
        shard = Shard(shared, [(0, size)], updater, {"params": params}, frozen, waiting)
        own = np.zeros(size, np.float32)
    window, message = (WindowServer, MessageServer) if comm.rank == 0 else (WindowClient, MessageClient)
    ends = {"window": window(routes), "message": message(routes), "window, bf16": window(halved)}
    memory = np.zeros(size, np.float32)
    win = MPI.Win.Create(memory, 4, MPI.INFO_NULL, comm)
    win.Lock_all()
    for _ in range(rounds):
        for _ in range(5):
            times["put"].append(put_both_ways(comm, win, grads))
        for _ in range(5 if alone and comm.rank == 1 else 0):
            began = time.perf_counter()
            shard.apply(grads, Push(0))
            shard.read(own)
            times["shared memory"].append(time.perf_counter() - began)
        for name, rpc in ends.items():
            comm.Barrier()
            if comm.rank == 0:
                serve(rpc, memory)
            else:
                for _ in range(5):
                    began = time.perf_counter()
                    rpc.send_request(0, PUSH, vector=grads)
                    rpc.wait_reply(0)
                    rpc.send_request(0, PULL)
                    rpc.wait_reply(0)
                    times[name].append(time.perf_counter() - began)
                rpc.send_request(0, STOP)
                rpc.wait_reply(0)
    if comm.rank == 1:
        # The time of a Put depends on its origin, so each rank reports the time of its own Puts.
        to_server, back = statistics.median(times["put"]), comm.recv(source=0)
        bare = to_server + back
        print(
            f"{mib:g} MiB each way, ms: bare Put {1e3 * bare:.2f} "
            f"(to server {1e3 * to_server:.2f}, back {1e3 * back:.2f})"
        )
        for name in [name for name in times if name != "put"]:
            took = statistics.median(times[name])
            rate = 2 * 8 * mib * (1 << 20) / took / 1e9
            print(f"push and pull by {name:13} {1e3 * took:8.2f}   {took / bare:5.2f} x bare   {rate:6.2f} Gbit/s")
    else:
        comm.send(statistics.median(times["put"]), dest=1)
    win.Unlock_all()
    win.Free()
    for name in ("window", "window, bf16"):
        ends[name].free()
    if alone:
        shared.free()


def put_both_ways(comm, win, grads) -> float:
    """Return the seconds of this rank's own Put and Flush, while the other rank lets MPI progress."""
    took = 0.0
    for origin in (0, 1):
        comm.Barrier()
        if comm.rank == origin:
            began = time.perf_counter()
            win.Put(grads, 1 - origin)
            win.Flush(1 - origin)
            took = time.perf_counter() - began
        comm.Barrier()
    return took


def serve(rpc, params) -> None:
    while True:
        for client, kind, _ in rpc.requests():
            if kind == PUSH:
                rpc.request_vector(client)
            rpc.send_reply(client, vector=params if kind == PULL else None)
            if kind == STOP:
                return


def start_ranks(arguments: argparse.Namespace) -> None:
    mpirun = str(Path(sys.executable).parent / "mpirun")
    environment = {
        **os.environ,
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    rank = [sys.executable, __file__, "--rank", "--mib", str(arguments.mib), "--rounds", str(arguments.rounds)]
    rank += ["--hosts"] if arguments.hosts else []
    with ExitStack() as stack:
        if arguments.hosts:
            from tests.support.hosts.network import make_hosts

            hosts = stack.enter_context(make_hosts(Path(sys.executable), 2, arguments.rate))
            words, environment = hosts.launch([1, 1], rank), {**environment, **hosts.environment}
        else:
            words = [mpirun, "-n", "2", "--bind-to", "core", *rank]
        subprocess.run(words, check=True, env=environment, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--rate", default="")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.mib, arguments.rounds)
    else:
        start_ranks(arguments)


if __name__ == "__main__":
    main()
