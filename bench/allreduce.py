"""Averaging a float32 vector on one node: shared memory against MPI_Allreduce and against memcpy.

    python bench/allreduce.py [--ranks 2] [--rounds 5]

Measures the averaging of ``--mode local``, which leaves the mean in memory shared by all ranks of the node. ``copied``
adds a copy of the mean to the rank's own memory. The compared MPI libraries run MPI_Allreduce in place, each in its own
environment, in alternating rounds. With --inner, this file is the program that the ranks run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIZES_KIB = [256, 1024, 4096, 16384, 65536, 262144]
PEERS = {"Open MPI": ".venv", "MPICH": ".venv-mpich", "Intel MPI": ".venv-intel"}


def inner(repeats: int) -> None:
    import numpy as np

    from mpitrain.comm.allreduce import MeanAllreduce
    from mpitrain.comm.hierarchy import Hierarchy
    from mpitrain.comm.mpi import start

    comm = start()
    result = {}
    for kib in SIZES_KIB:
        size = kib * 256
        hierarchy = Hierarchy(comm, comm, len(os.sched_getaffinity(0)))
        average = MeanAllreduce(hierarchy, size, np.float32)
        source, target = np.full(size, comm.rank + 1, np.float32), np.zeros(size, np.float32)
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(max(5, min(repeats, 2_000_000 // kib))):
            for kind in ("average", "copied", "memcpy"):
                average.own[:] = source
                comm.Barrier()
                began = time.perf_counter()
                if kind == "memcpy":
                    np.copyto(target, source)
                else:
                    mean = average.reduce()
                    if kind == "copied":
                        np.copyto(target, mean)
                times[kind].append(time.perf_counter() - began)
                if kind != "memcpy":
                    assert mean[0] == mean[-1] == (comm.size + 1) / 2
        result[kib] = {kind: statistics.median(values) for kind, values in times.items()}
        hierarchy.free()
    if comm.rank == 0:
        print(json.dumps(result))


def launch(environment: str, ranks: int, program: list[str]) -> dict[str, object]:
    folder = ROOT / environment / "bin"
    words = [str(folder / "mpirun"), "-n", str(ranks)]
    if environment == ".venv":
        words += ["--bind-to", "core"] if ranks <= (os.cpu_count() or 1) else ["--oversubscribe", "--bind-to", "none"]
    variables = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",
    }
    done = subprocess.run(
        [*words, str(folder / "python"), *program], check=True, stdout=subprocess.PIPE, text=True, env=variables
    )
    found: dict[str, object] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--inner", action="store_true")
    arguments = parser.parse_args()
    if arguments.inner:
        inner(arguments.repeats)
        return
    peers = {name: folder for name, folder in PEERS.items() if (ROOT / folder / "bin" / "mpirun").exists()}
    figures: dict[str, dict[str, list[float]]] = {str(kib): defaultdict(list) for kib in SIZES_KIB}
    for _ in range(arguments.rounds):
        own = launch(".venv", arguments.ranks, [__file__, "--inner", "--repeats", str(arguments.repeats)])
        for kib, kinds in own.items():
            for kind, seconds in kinds.items():  # type: ignore[attr-defined]
                figures[kib][kind].append(seconds)
        program = [str(ROOT / "bench" / "peers" / "allreduce.py"), str(arguments.repeats), *map(str, SIZES_KIB)]
        for name, folder in peers.items():
            for kib, seconds in launch(folder, arguments.ranks, program).items():
                figures[kib][name].append(seconds)  # type: ignore[arg-type]
    kinds = ["average", "copied", "memcpy", *peers]
    print(f"{arguments.ranks} ranks, float32, ms: medians of {arguments.rounds} rounds")
    print(f"{'KiB':>8} " + " ".join(f"{kind:>10}" for kind in kinds) + f" {'best MPI/average':>17} {'copied':>8}")
    for kib in SIZES_KIB:
        ms = {kind: 1e3 * statistics.median(figures[str(kib)][kind]) for kind in kinds}
        best = min(ms[name] for name in peers)
        print(
            f"{kib:8} "
            + " ".join(f"{ms[kind]:10.3f}" for kind in kinds)
            + f" {best / ms['average']:16.2f}x {best / ms['copied']:7.2f}x"
        )


if __name__ == "__main__":
    main()
