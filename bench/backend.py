"""The backend of torch.distributed against gloo, and against plain MPI calls, on the ranks of one mpirun.

    python bench/backend.py [--ranks 2] [--rounds 9] [--parts collectives ddp] [--hosts] [--rate 1gbit]

``--hosts`` (root, iproute2) puts the ranks in two network namespaces. ``--rate`` limits the rate of their links.

The same processes measure both backends, each with its process group, in alternating rounds with one thread per rank. A
result is the median over rounds.
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
from contextlib import ExitStack
from pathlib import Path

BENCH = Path(__file__).parent
SIZES = [4, 64, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
LARGEST = {"all_gather": 64 << 20, "all_to_all": 64 << 20, "reduce_scatter": 256 << 20}
BYTES_PER_ROUND = 64 << 20
STEPS = {"mlp100": 300, "mlp1024": 100, "cnn": 20, "gpt": 6}  # of a round
TARGETS = {"mlp100": 1.8, "mlp1024": 2.0, "cnn": 0.98, "gpt": 0.98}


def programs_of(name: str, nbytes: int, groups: dict[str, object]) -> dict[str, Callable[[], object]]:
    """Return functions that run an operation on ``nbytes`` per rank: one for each group, and one for plain MPI."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    comm, size = MPI.COMM_WORLD, dist.get_world_size()
    n = max(1, nbytes // 4)
    whole, part = torch.zeros(n * size), torch.zeros(n)
    equal, received = torch.zeros(max(size, n // size * size)), torch.zeros(max(size, n // size * size))
    share = torch.zeros(equal.numel() // size)
    calls: dict[str, tuple[Callable[[object], object], Callable[[], object]]] = {
        "all_reduce": (
            lambda group: dist.all_reduce(part, group=group),
            lambda: comm.Allreduce(MPI.IN_PLACE, part.numpy()),
        ),
        "broadcast": (lambda group: dist.broadcast(part, 0, group=group), lambda: comm.Bcast(part.numpy())),
        "all_gather": (
            lambda group: dist.all_gather_into_tensor(whole, part, group=group),
            lambda: comm.Allgather(part.numpy(), whole.numpy()),
        ),
        "reduce_scatter": (
            lambda group: dist.reduce_scatter_tensor(share, equal, group=group),
            lambda: comm.Reduce_scatter_block(equal.numpy(), share.numpy()),
        ),
        "all_to_all": (
            lambda group: dist.all_to_all_single(received, equal, group=group),
            lambda: comm.Alltoall(equal.numpy(), received.numpy()),
        ),
    }
    call, plain = calls[name]
    return {**{key: (lambda group=group: call(group)) for key, group in groups.items()}, "MPI": plain}


def collectives(rounds: int, largest: int) -> None:
    """Print microseconds per call by size: this backend, gloo, MPI, and the ratio of gloo to this backend."""
    import torch.distributed as dist
    from mpi4py import MPI

    comm, groups = MPI.COMM_WORLD, {"mpitrain": None, "gloo": dist.new_group(backend="gloo")}
    if comm.rank == 0:
        print(f"{'operation':15}{'bytes':>11}{'mpitrain us':>13}{'gloo us':>11}{'MPI us':>11}   gloo / mpitrain")
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"):
        for nbytes in (size for size in SIZES if size <= min(largest, LARGEST.get(name, size))):
            programs = programs_of(name, nbytes, groups)
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
            if comm.rank == 0:
                times = f"{us['mpitrain']:13,.1f}{us['gloo']:11,.1f}{us['MPI']:11,.1f}"
                print(f"{name:15}{nbytes:11,}{times}{us['gloo'] / us['mpitrain']:9.2f}", flush=True)


def loop_of(name: str, group: object) -> Callable[[int], float]:
    """Return a training loop, which takes the number of steps and returns the examples/s of all ranks.

    Args:
        group: The process group of DistributedDataParallel; ``alone`` for a model that is not wrapped.
    """
    import torch
    import torch.distributed as dist
    import torch_models as models
    from torch import nn

    rank, size, batch = dist.get_rank(), dist.get_world_size(), models.BATCH[name]
    examples, labels = map(torch.from_numpy, models.arrays_of(name))
    torch.manual_seed(0)
    model = models.module_of(name)
    if group != "alone":
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    order = torch.randperm(len(examples))

    def train(steps: int) -> float:
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


def ddp(rounds: int, names: list[str]) -> None:
    """Print examples/s of DistributedDataParallel over both backends, and the median of the rounds' ratios.

    Also measured: DistributedDataParallel in groups of one rank, which do not communicate, and models without
    DistributedDataParallel.
    """
    import torch.distributed as dist

    sys.path.insert(0, str(BENCH / "jobs"))
    singles = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    groups = {"mpitrain": None, "gloo": dist.new_group(backend="gloo")}
    groups |= {"DDP of one rank each": singles[dist.get_rank()], "without DDP": "alone"}
    for name in names:
        loops = {key: loop_of(name, group) for key, group in groups.items()}
        found: dict[str, list[float]] = {key: [] for key in loops}
        for train in loops.values():
            train(max(3, STEPS[name] // 10))
        for _ in range(rounds):
            for key, train in loops.items():
                found[key].append(train(STEPS[name]))
        ratio = statistics.median(a / b for a, b in zip(found["mpitrain"], found["gloo"], strict=True))
        if dist.get_rank() == 0:
            rates = ", ".join(f"{key} {statistics.median(values):,.0f}" for key, values in found.items())
            print(f"{name:8} examples/s: {rates}; {ratio:.2f} x gloo (target {TARGETS[name]})", flush=True)


def cpu() -> str:
    """Return the CPU's name, family and model."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(reversed([tuple(map(str.strip, line.split(":", 1))) for line in lines if ":" in line]))
    return f"{fields.get('model name')} (family {fields.get('cpu family')}, model {fields.get('model')})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", nargs="*", default=["collectives", "ddp"], choices=["collectives", "ddp"])
    parser.add_argument("--models", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--largest", type=int, default=SIZES[-1], metavar="BYTES")
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--rate", default="")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.rank:
        raise SystemExit(launch(arguments))
    measure(arguments)


def launch(arguments: argparse.Namespace) -> int:
    """Run this program on the ranks; return mpirun's exit status."""
    rank = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if arguments.ranks > (os.cpu_count() or 1):
        environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    with ExitStack() as stack:
        if arguments.hosts:
            sys.path.insert(0, str(BENCH.parent))
            from tests.support.hosts.network import make_hosts

            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
            hosts = stack.enter_context(make_hosts(Path(sys.executable), 2, arguments.rate))
            share = ["env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0", *rank]
            words = hosts.launch([arguments.ranks - arguments.ranks // 2, arguments.ranks // 2], share)
            environment |= hosts.environment
        else:
            mpirun = str(Path(sys.executable).parent / "mpirun")
            words = [mpirun, "-n", str(arguments.ranks), "--oversubscribe", "--bind-to", "none", *rank]
        return subprocess.run(words, env=environment).returncode


def measure(arguments: argparse.Namespace) -> None:
    """Run the measurements on this rank."""
    import torch
    import torch.distributed as dist

    import mpitrain

    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("mpitrain", init_method="mpitrain://")
    if dist.get_rank() == 0:
        versions = f"torch {torch.__version__}, mpitrain {mpitrain.__version__}, Python {platform.python_version()}"
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(f"{arguments.ranks} ranks, {os.cpu_count()} cores, {cpu()}; {versions}; load {load}", flush=True)
    if "ddp" in arguments.parts:
        ddp(arguments.rounds, arguments.models)
    if "collectives" in arguments.parts:
        collectives(arguments.rounds, arguments.largest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
