"""One GPU: training against PyTorch, optimizer updates against a copy, sums in host memory, and memory use.

    python bench/gpu.py [jobs] [update] [sums] [memory] [--torch PYTHON] [--mpirun MPIRUN] [--rounds 3] [--small]

Each round runs every program once, alternating. A result is the median over rounds of the median over a run's
intervals. Start-up, compilation and validation are excluded for all programs. ``--small`` only checks within a minute
that everything runs; its results are meaningless.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from environment import one_thread_and_own_kernels

ROOT = Path(__file__).parent.parent


class Run(NamedTuple):
    """A job, its name in the peer's script, and its target ratios."""

    title: str
    job: Path
    peer: str
    batch: int
    steps: int
    precision: str
    over_eager: float
    over_compiled: float


JOBS, OWN = ROOT / "jobs", ROOT / "bench" / "jobs"
RUNS = [
    Run("mnist_mlp, batch 100", JOBS / "mnist_mlp.py", "mlp", 100, 5000, "float32", 4.0, 1.5),
    Run("fashion_cnn, batch 512", JOBS / "fashion_cnn.py", "cnn", 512, 500, "float32", 1.0, 1.0),
    Run("fashion_cnn, batch 512", JOBS / "fashion_cnn.py", "cnn", 512, 500, "tf32", 1.0, 1.0),
    Run("wide MLP, batch 8192", OWN / "wide_mlp.py", "wide", 8192, 200, "bfloat16", 1.0, 1.0),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=["jobs", "update", "sums", "memory", []])
    parser.add_argument("--torch", default=sys.executable, help="Python interpreter with PyTorch; '' skips the peer")
    parser.add_argument("--mpirun", default=str(Path(sys.executable).parent / "mpirun"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    if arguments.part:
        sum_by_hosts(int(arguments.part))
        return
    describe()
    sections: dict[str, Callable[[Any], None]] = {"jobs": jobs, "update": update, "sums": sums, "memory": memory}
    for name in arguments.sections or sections:
        print(f"\n{name}", flush=True)
        sections[name](arguments)


def describe() -> None:
    """Print the device, the versions and the date."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    words = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        driver = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        driver = "unknown"
    print(f"{time.strftime('%Y-%m-%d')}  {properties['name'].decode()}  (driver, clock, power: {driver})")
    print(f"Python {sys.version.split()[0]}, CuPy {cupy.__version__}, NumPy {np.__version__}", flush=True)


# Training.


def jobs(arguments: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), 2_000 if arguments.small else 60_000)
        print(f"{'':24} {'precision':10} {'steps/s':>9} {'eager':>9} {'compiled':>9}   ratios (target)")
        for run in RUNS:
            compare(run, folder, arguments)


def compare(run: Run, folder: str, arguments: Any) -> None:
    figures: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        figures["ours"].append(ours(run, folder, arguments.small))
        for mode in ("eager", "compile", "reduce-overhead") if arguments.torch else ():
            figures[mode].append(peer(run, mode, arguments))
    medians = {name: statistics.median(found) for name, found in figures.items()}
    own = medians.pop("ours")
    line = f"{run.title:24} {run.precision:10} {own:9,.1f}"
    if medians:
        eager, compiled = medians["eager"], max(medians["compile"], medians["reduce-overhead"])
        line += f" {eager:9,.1f} {compiled:9,.1f}   {own / eager:.2f}x ({run.over_eager:g})"
        line += f"  {own / compiled:.2f}x ({run.over_compiled:g})"
    print(line, flush=True)


def ours(run: Run, folder: str, small: bool, *more: str) -> float:
    """Return steps/s."""
    lines = metrics_of(run, folder, small, *more)
    return statistics.median([line["examples_per_s"] for line in lines if "examples_per_s" in line][1:]) / run.batch


def metrics_of(run: Run, folder: str, small: bool, *more: str) -> list[dict[str, Any]]:
    """Return the metrics of a training run."""
    steps, batch = (20, 16) if small else (run.steps, run.batch)
    of_data = ["--data-dir", folder] if run.peer != "wide" else ["--side", "64"] if small else []
    with tempfile.TemporaryDirectory() as run_dir:
        words = [sys.executable, "-m", "mpitrain", "train", str(run.job), "--device", "gpu", *of_data]
        words += ["--precision", run.precision, "--batch-size", str(batch), "--train-steps", str(steps)]
        words += ["--log-steps", str(steps // 10), "--validate-steps", "0", "--run-dir", run_dir, *more]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
        return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def peer(run: Run, mode: str, arguments: Any) -> float:
    words = [arguments.torch, str(ROOT / "bench" / "peers" / "torch_gpu.py"), run.peer, str(run.batch)]
    done = subprocess.run([*words, str(run.steps), run.precision, mode], stdout=subprocess.PIPE, check=True, text=True)
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def make_images(folder: Path, count: int) -> None:
    """Write noise to files in MNIST's format; speed does not depend on the content."""
    rng = np.random.default_rng(0)
    for kind, n in (("train", count), ("t10k", count // 6)):
        pictures, labels = rng.integers(0, 256, n * 784, np.uint8), rng.integers(0, 10, n, np.uint8)
        with gzip.open(folder / f"{kind}-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
            file.write(struct.pack(">IIII", 0x803, n, 28, 28) + pictures.tobytes())
        with gzip.open(folder / f"{kind}-labels-idx1-ubyte.gz", "wb", compresslevel=1) as file:
            file.write(struct.pack(">II", 0x801, n) + labels.tobytes())


# The optimizer's update.


def update(arguments: Any) -> None:
    """Print the bandwidth of updates (bytes read and written per second), and of a copy on the device."""
    from mpitrain import optim
    from mpitrain.core.layout import Layout
    from mpitrain.gpu.device import Gpu
    from mpitrain.gpu.update import GpuUpdate

    gpu = Gpu(0, 0.9)
    size = 1 << (14 if arguments.small else 27)
    layout = Layout.pack([("all.weight", (size,), "param")])
    with gpu.activate():
        source, target = gpu.zeros((size,), np.float32), gpu.zeros((size,), np.float32)
        rate = 2 * source.nbytes / fastest(gpu, lambda: gpu.compute.copy(source, target))
        print(f"copy on the device            {rate / 1e9:8,.0f} GB/s read and written")
        for optimizer in (
            optim.sgd(0.1),
            optim.momentum(0.1, 0.9),
            optim.adam(0.001),
            optim.adam(0.001, clip_norm=1.0),
        ):
            vectors = {name: gpu.zeros((size,), np.float32) for name in ("params", *optimizer.slots)}
            step = GpuUpdate(gpu, optimizer, layout, vectors, None, gpu.copy_of(np.ones(9)))
            seconds = fastest(gpu, lambda step=step: step(source, 3))
            # Every vector is read and written, the gradient is read; if its norm is needed, both happen once more.
            passes = 2 * len(vectors) + 1 + (2 if optimizer.needs_sums else 0)
            bandwidth = passes * source.nbytes / seconds
            clipped = ", clipped" if optimizer.needs_sums else ""
            text = f"{bandwidth / 1e9:8,.0f} GB/s  {bandwidth / rate:.0%} of a copy (target 85%)"
            print(f"{optimizer.name + clipped:29} {text}", flush=True)


def fastest(gpu: Any, work: Callable[[], object], rounds: int = 20) -> float:
    """Return the median time in seconds."""
    found = []
    for _ in range(rounds + 3):
        gpu.compute.wait()
        began = time.perf_counter()
        for _ in range(5):
            work()
        gpu.compute.wait()
        found.append((time.perf_counter() - began) / 5)
    return statistics.median(found[3:])


# Sums in host memory.


def sums(arguments: Any) -> None:
    size = 1 << (12 if arguments.small else 26)
    words = [arguments.mpirun, "-n", "2", "--oversubscribe", "--bind-to", "none", sys.executable, __file__]
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run([*words, "--part", str(size)], env=env, text=True, capture_output=True)
    print(done.stdout if done.returncode == 0 else f"failed: {done.stderr[-2000:]}", end="", flush=True)


def sum_by_hosts(size: int) -> None:
    """On two ranks that share a GPU: measure a sum through pinned memory, and its parts."""
    from mpitrain.comm.allreduce import MeanAllreduce
    from mpitrain.comm.cluster import Cluster
    from mpitrain.comm.hierarchy import Hierarchy
    from mpitrain.core.ranges import Bucket
    from mpitrain.gpu.allreduce.host import HostTransport
    from mpitrain.gpu.device import Gpu
    from mpitrain.gpu.stream import Stream, pinned
    from mpitrain.plan.config import RunConfig

    cluster = Cluster()
    cluster.assign(RunConfig())
    comm = cluster.workers
    hierarchy = Hierarchy(comm, cluster.training.node, cluster.cores)
    gpu = Gpu(0, 0.4)
    with gpu.activate():
        vector, host = gpu.zeros((size,), np.float32), pinned((size,), np.float32)
        second, device, back = Stream(), gpu.zeros((size,), np.float32), pinned((size,), np.float32)
        transport = HostTransport(hierarchy, gpu, vector, [Bucket(0, size)])
        mean = MeanAllreduce(hierarchy, size, np.float32, scale=1.0)
        sent, received = np.ones(size, np.float32), np.ones(size, np.float32)

        def staged() -> None:
            transport.start(0)
            transport.finish()
            gpu.compute.wait()

        def copied() -> None:
            gpu.compute.copy_to_host(vector, host)
            second.copy_to_device(back, device)
            gpu.compute.wait()
            second.wait()

        def alone() -> None:
            mean.reduce()

        def by_mpi() -> None:
            comm.Allreduce(sent, received)

        seconds = {work.__name__: together(comm, work) for work in (staged, copied, alone, by_mpi)}
    if comm.rank == 0:
        rates = {name: size * 4 / taking / 1e9 for name, taking in seconds.items()}
        print(f"{size * 4 / 2**20:,.0f} MiB on two ranks that share the GPU, GB/s of the vector")
        print(f"  sum through pinned memory          {rates['staged']:7.2f}")
        print(f"  pinned copies in both directions   {rates['copied']:7.2f}")
        print(f"  sum in shared memory, no GPU       {rates['alone']:7.2f}")
        print(f"  MPI_Allreduce in host memory       {rates['by_mpi']:7.2f}")
        slower = min(rates["copied"], rates["by_mpi"])
        print(f"  {rates['staged'] / slower:.0%} of the slower of copies and MPI (target 80%)", flush=True)


def together(comm: Any, work: Callable[[], object], rounds: int = 10) -> float:
    """Return the seconds of the slowest rank, the median of some rounds."""
    found = []
    for _ in range(rounds + 3):
        comm.Barrier()
        began = time.perf_counter()
        work()
        found.append(max(comm.allgather(time.perf_counter() - began)))
    return statistics.median(found[3:])


# Memory.


def memory(arguments: Any) -> None:
    print(f"{'':24} {'precision':10} {'accounted':>10} {'held':>10}   (MiB)")
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), 2_000 if arguments.small else 60_000)
        for run in RUNS:
            lines = metrics_of(run, folder, arguments.small, "--train-steps", "20", "--log-steps", "0")
            use = next(line["device_memory"] for line in lines if "device_memory" in line)
            held = use.pop("held")
            accounted = sum(use.values())
            parts = ", ".join(f"{name} {nbytes / 2**20:,.0f}" for name, nbytes in use.items())
            text = (
                f"{accounted / 2**20:10,.1f} {held / 2**20:10,.1f}   {held / accounted - 1:+.1%} (target at most +10%)"
            )
            print(f"{run.title:24} {run.precision:10} {text}  {parts}", flush=True)


if __name__ == "__main__":
    main()
