"""The backend of torch.distributed against gloo, and against plain MPI calls, on the ranks of one mpirun.

    python bench/backend.py [--ranks 2] [--rounds 9] [--parts collectives ddp]

Both backends are process groups of the same processes, which measure them in alternating rounds with one thread per
rank. A result is the median over rounds. The training loops are those of a user of DistributedDataParallel, unchanged.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

BENCH = Path(__file__).parent
SIZES = [4, 64, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
LARGEST = {"all_gather": 64 << 20, "all_to_all": 64 << 20, "reduce_scatter": 256 << 20}
BYTES_PER_ROUND = 64 << 20
STEPS = {"mlp100": 300, "mlp1024": 100, "cnn": 20, "gpt": 6}  # of a round
TARGETS = {"mlp100": 1.8, "mlp1024": 2.0, "cnn": 0.98, "gpt": 0.98}


def collectives(rounds: int) -> None:
    """Print microseconds per call by size: this backend, gloo, MPI, and the ratio of gloo to this backend."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    groups = {"mpitrain": None, "gloo": dist.new_group(backend="gloo")}
    size, comm = dist.get_world_size(), MPI.COMM_WORLD
    if dist.get_rank() == 0:
        print(f"{'operation':15}{'bytes':>11}{'mpitrain us':>13}{'gloo us':>11}{'MPI us':>11}   gloo / mpitrain")
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"):
        for nbytes in SIZES:
            if nbytes > LARGEST.get(name, nbytes):
                continue
            n = max(1, nbytes // 4)
            whole, part = torch.zeros(n * size), torch.zeros(n)
            equal, received = torch.zeros(max(size, n // size * size)), torch.zeros(max(size, n // size * size))
            share = torch.zeros(equal.numel() // size)
            calls: dict[str, Callable[[object], object]] = {
                "all_reduce": lambda group: dist.all_reduce(part, group=group),
                "broadcast": lambda group: dist.broadcast(part, 0, group=group),
                "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
                "reduce_scatter": lambda group: dist.reduce_scatter_tensor(share, equal, group=group),
                "all_to_all": lambda group: dist.all_to_all_single(received, equal, group=group),
            }
            plain: dict[str, Callable[[], object]] = {
                "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, part.numpy()),
                "broadcast": lambda: comm.Bcast(part.numpy()),
                "all_gather": lambda: comm.Allgather(part.numpy(), whole.numpy()),
                "reduce_scatter": lambda: comm.Reduce_scatter_block(equal.numpy(), share.numpy()),
                "all_to_all": lambda: comm.Alltoall(equal.numpy(), received.numpy()),
            }
            programs = {key: (lambda group=group: calls[name](group)) for key, group in groups.items()}
            programs["MPI"] = plain[name]
            repeats = max(1, min(100, BYTES_PER_ROUND // 4 // nbytes))
            found: dict[str, list[float]] = {key: [] for key in programs}
            for program in programs.values():
                program()
            for _ in range(rounds):
                for key, program in programs.items():
                    comm.Barrier()
                    began = time.perf_counter()
                    for _ in range(repeats):
                        program()
                    found[key].append(comm.allreduce(time.perf_counter() - began, op=MPI.MAX) / repeats)
            us = {key: 1e6 * statistics.median(values) for key, values in found.items()}
            if dist.get_rank() == 0:
                ratio = us["gloo"] / us["mpitrain"]
                print(
                    f"{name:15}{nbytes:11,}{us['mpitrain']:13,.1f}{us['gloo']:11,.1f}{us['MPI']:11,.1f}{ratio:9.2f}",
                    flush=True,
                )


def ddp(rounds: int, names: list[str]) -> None:
    """Print examples/s of DistributedDataParallel over both backends, and the median of the rounds' ratios."""
    import torch
    import torch.distributed as dist
    from torch import nn

    sys.path.insert(0, str(BENCH / "jobs"))
    import torch_models as models

    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {"mpitrain": None, "gloo": dist.new_group(backend="gloo")}
    for name in names:
        examples, labels = map(torch.from_numpy, models.arrays_of(name))
        batch = models.BATCH[name]

        def loop(group: object, name: str = name) -> Callable[[int], float]:
            torch.manual_seed(0)
            model = models.module_of(name)
            if group != "alone":
                model = nn.parallel.DistributedDataParallel(model, process_group=group)
            optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
            order = torch.randperm(len(examples))

            def train(steps: int) -> float:
                """Train; return the examples/s of all ranks."""
                dist.barrier()
                began = time.perf_counter()
                for step in range(steps):
                    start = (step * size + rank) * batch % (len(examples) - batch)
                    chosen = order[start : start + batch]
                    optimizer.zero_grad()
                    models.loss_of(model(examples[chosen]), labels[chosen]).backward()
                    optimizer.step()
                dist.barrier()
                return steps * batch * size / (time.perf_counter() - began)

            return train

        loops = {**{key: loop(group) for key, group in groups.items()}, "alone": loop("alone")}
        found: dict[str, list[float]] = {key: [] for key in loops}
        for train in loops.values():
            train(max(3, STEPS[name] // 10))
        for _ in range(rounds):
            for key, train in loops.items():
                found[key].append(train(STEPS[name]))
        ratios = [a / b for a, b in zip(found["mpitrain"], found["gloo"], strict=True)]
        if rank == 0:
            rates = ", ".join(f"{key} {statistics.median(values):,.0f}" for key, values in found.items())
            print(f"DDP {name:8} examples/s: {rates}; ratio to gloo {statistics.median(ratios):.2f} (target {TARGETS[name]})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", nargs="*", default=["collectives", "ddp"], choices=["collectives", "ddp"])
    parser.add_argument("--models", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.rank:
        launch = [str(Path(sys.executable).parent / "mpirun"), "-n", str(arguments.ranks)]
        options = ["--oversubscribe", "--bind-to", "none"]
        settings = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if arguments.ranks > (os.cpu_count() or 1):
            settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
        words = [*launch, *options, sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--rank"]
        raise SystemExit(subprocess.run(words, env={**os.environ, **settings}).returncode)
    import torch
    import torch.distributed as dist

    import mpitrain

    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("mpitrain", init_method="mpitrain://")
    if dist.get_rank() == 0:
        model = next(
            (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
        )
        print(f"{arguments.ranks} ranks, {os.cpu_count()} cores, {model}; torch {torch.__version__}, mpitrain {mpitrain.__version__}, Python {platform.python_version()}", flush=True)
    if "ddp" in arguments.parts:
        ddp(arguments.rounds, arguments.models)
    if "collectives" in arguments.parts:
        collectives(arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
