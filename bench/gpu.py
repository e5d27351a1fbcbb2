"""One GPU: training compared with PyTorch, optimizer updates with a copy, sums in host memory with MPI; memory use.

    python bench/gpu.py [mnist_mlp] [fashion_cnn] [wide_mlp] [torch_models] [update] [sums] [memory]
                        [--precision P] [--rounds 3] [--data gpu|host] [--torch PYTHON] [--mpirun MPIRUN] [--small]

Each round runs every program once, alternating; each measurement is printed at once. A result is the median over rounds
of the median over a run's intervals. Start-up, compilation and validation are excluded for all programs. A program that
fails is reported in one line, with its output on stderr, and does not run again. The other programs continue, and the
exit status is 1. ``--small`` only checks within a minute that everything runs; its results are meaningless.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from environment import ROOT, one_thread_and_own_kernels, require_gpu, use_this_checkout

LIMIT_S = 300


class Failed(Exception):
    """A program failed or printed no result; the message is one line."""


class Measured(NamedTuple):
    """The speed of a training run in steps/s, and the bytes of GPU memory that it held, without the CUDA context."""

    rate: float
    memory: int


class Run(NamedTuple):
    """A job, and the same training with PyTorch.

    Attributes:
        peer: The model's name in ``peers/torch_gpu.py``.
        targets: Minimum speed relative to each mode of PyTorch; ``best`` is the fastest mode.
        flags: The job's own flags.
    """

    job: Path
    peer: str
    batch: int
    steps: int
    precision: str
    targets: dict[str, float]
    flags: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.peer if self.flags else self.job.stem}, batch {self.batch}, {self.precision}"


PRECISIONS = ("float32", "tf32", "bfloat16")
JOBS, OWN, PEERS = ROOT / "jobs", ROOT / "bench" / "jobs", ROOT / "bench" / "peers"
BEST, BARE = {"best": 1.0}, {"eager": 0.97}
RUNS = [
    Run(JOBS / "mnist_mlp.py", "mlp", 100, 20_000, "float32", {"eager": 4.0, "compiled": 1.5, "graph": 1.0}),
    *(Run(JOBS / "fashion_cnn.py", "cnn", 512, 1000, precision, BEST) for precision in PRECISIONS),
    Run(OWN / "wide_mlp.py", "wide", 8192, 200, "bfloat16", BEST),
    *(
        Run(OWN / "torch_models.py", name, batch, steps, "float32", BARE, ("--model", name))
        for name, batch, steps in (("mlp1024", 100, 5000), ("cnn", 64, 2000), ("gpt", 16, 1000))
    ),
]
MODES = {"eager": ["eager"], "compiled": ["compile", "reduce-overhead"], "graph": ["graph"]}  # result: peer's modes


def main() -> None:
    names = list(dict.fromkeys(run.job.stem for run in RUNS))
    sections: dict[str, Callable[[Any], bool]] = {"update": update, "sums": sums, "memory": memory}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"{', '.join([*names, *sections])}; all by default")
    parser.add_argument("--precision", choices=PRECISIONS, help="only the runs of this precision")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", choices=["gpu", "host"], default="gpu", help="where the peer holds its examples")
    parser.add_argument("--torch", default=sys.executable, help="Python interpreter with PyTorch; '' skips the peer")
    parser.add_argument("--mpirun", default=find_mpirun(), help="mpirun of the MPI library that mpi4py uses")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in [*names, *sections]:
            parser.error(f"{name} is not one of {', '.join([*names, *sections])}")
    one_thread_and_own_kernels()
    use_this_checkout()
    if arguments.part:
        PARTS[arguments.part](arguments.small)
        return
    require_gpu()
    chosen = arguments.names or [*names, *sections]
    ok = [compare(name, arguments) for name in names if name in chosen]
    for name, section in sections.items():
        if name in chosen:
            print(f"\n{name}", flush=True)
            ok.append(section(arguments))
    sys.exit(0 if all(ok) else 1)


def find_mpirun() -> str:
    """Return the mpirun of this Python's environment, or else of PATH."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return shutil.which("mpirun", path=os.pathsep.join(folders)) or "mpirun"


def output_of(words: list[str], shows: bool = False) -> str:
    """Run a program and return its output. With ``shows``, the output goes to stdout instead; returns ''.

    Raises:
        Failed: The program failed, timed out, or could not be started.
    """
    stdout = None if shows else subprocess.PIPE
    try:
        done = subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"no result after {LIMIT_S} s") from None
    except OSError as error:
        raise Failed(str(error)) from None
    if done.returncode == 0:
        return done.stdout or ""
    print(" ".join(words), done.stdout or "", done.stderr, sep="\n", file=sys.stderr)
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
    message = [line for line in lines if line.startswith("mpitrain: ")][:1]
    raise Failed("; ".join(dict.fromkeys([*message, lines[-1]])))


def succeeded(title: str, program: Callable[[], object]) -> bool:
    """Run a program; return whether it succeeded, and print the reason if not."""
    try:
        program()
    except Failed as error:
        print(f"{title}  failed: {error}", flush=True)
        return False
    return True


# Training.


def compare(name: str, arguments: Any) -> bool:
    """Print the results of a job in each precision; return whether every program succeeded."""
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), 2_000 if arguments.small else 60_000)
        runs = [run for run in RUNS if run.job.stem == name and arguments.precision in (None, run.precision)]
        results = [compare_run(run, folder, arguments) for run in runs]
    return all(results)


def compare_run(run: Run, folder: str, arguments: Any) -> bool:
    print(f"\n{run.title}", flush=True)
    programs: dict[str, Callable[[], Measured]] = {"mpitrain": partial(measure_own, run, folder, arguments.small)}
    results = MODES if "best" in run.targets else run.targets
    for mode in [mode for result in results for mode in MODES[result]] if arguments.torch else []:
        programs[mode] = partial(measure_peer, run, mode, arguments)
    rates: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(arguments.rounds):
        for name in list(rates):

            def measure(name: str = name) -> None:
                measured = programs[name]()
                rates[name].append(measured.rate)
                print(f"  {name:16} {measured.rate:10,.1f} steps/s {measured.memory / 2**20:10,.0f} MiB", flush=True)

            if not succeeded(f"  {name:16}", measure):
                del rates[name]
    print_ratios(run, {name: statistics.median(found) for name, found in rates.items()})
    return rates.keys() == programs.keys()


def print_ratios(run: Run, rates: dict[str, float]) -> None:
    """Print mpitrain's speed relative to each mode of PyTorch that has a result."""
    own = rates.pop("mpitrain", None)
    peers = {result: [rates[mode] for mode in modes if mode in rates] for result, modes in MODES.items()}
    best = {result: max(found) for result, found in peers.items() if found}
    if own is None or not best:
        return
    fastest = max(best, key=lambda result: best[result])
    ratios = [f"{own / rate:.2f}x {result}{target(run, result)}" for result, rate in best.items()]
    if "best" in run.targets and len(rates) == sum(map(len, MODES.values())):
        ratios.append(f"{own / best[fastest]:.2f}x the best, {fastest}{target(run, 'best')}")
    print(f"  {'; '.join(ratios)}", flush=True)


def target(run: Run, result: str) -> str:
    return f" (target {run.targets[result]:g})" if result in run.targets else ""


def measure_own(run: Run, folder: str, small: bool) -> Measured:
    """Return mpitrain's results; print how it computes convolutions."""
    lines, output = train(run, folder, small, "--log-device-placement")
    print("".join(f"  {line}\n" for line in output.splitlines() if "cuDNN" in line), end="")
    batch = 4 if small else run.batch
    rate = statistics.median([line["examples_per_s"] for line in lines if "examples_per_s" in line][1:]) / batch
    use = next(line["device_memory"] for line in lines if "device_memory" in line)
    return Measured(rate, use["held"] + use.get("torch", 0))


def train(run: Run, folder: str, small: bool, *more: str) -> tuple[list[dict[str, Any]], str]:
    """Return the metrics of a training run, and its output."""
    steps, batch = (20, 4) if small else (run.steps, run.batch)
    flags = ["--data-dir", folder] if run.job.parent == JOBS else ["--side", "64"] if small and not run.flags else []
    with tempfile.TemporaryDirectory() as run_dir:
        words = [sys.executable, "-m", "mpitrain", "train", str(run.job), "--device", "gpu", *run.flags, *flags]
        words += ["--precision", run.precision, "--batch-size", str(batch), "--train-steps", str(steps)]
        words += ["--log-steps", str(steps // 10), "--validate-steps", "0", "--run-dir", run_dir, *more]
        output = output_of(words)
        lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], output


def measure_peer(run: Run, mode: str, arguments: Any) -> Measured:
    """Return PyTorch's results."""
    steps, batch = (20, 4) if arguments.small else (run.steps, run.batch)
    words = [arguments.torch, str(PEERS / "torch_gpu.py"), run.peer if not run.flags else f"jobs.{run.peer}"]
    output = output_of([*words, str(batch), str(steps), run.precision, mode, "--data", arguments.data])
    result = json.loads(output.splitlines()[-1])
    return Measured(statistics.median(result["steps_per_s"]), result["memory"])


def make_images(folder: Path, count: int) -> None:
    """Write random images to files in MNIST's format; speed does not depend on the content."""
    rng = np.random.default_rng(0)
    for kind, n in (("train", count), ("t10k", count // 6)):
        images, labels = rng.integers(0, 256, n * 784, np.uint8), rng.integers(0, 10, n, np.uint8)
        with gzip.open(folder / f"{kind}-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
            file.write(struct.pack(">IIII", 0x803, n, 28, 28) + images.tobytes())
        with gzip.open(folder / f"{kind}-labels-idx1-ubyte.gz", "wb", compresslevel=1) as file:
            file.write(struct.pack(">II", 0x801, n) + labels.tobytes())


# Parts of this script that use the GPU. Each runs in a separate process, so that its memory is free for the next part.


def update(arguments: Any) -> bool:
    return succeeded("update", partial(output_of, part("update", arguments), shows=True))


def sums(arguments: Any) -> bool:
    launcher = [arguments.mpirun, "-n", "2", "--oversubscribe", "--bind-to", "none"]
    os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return succeeded("sums", partial(output_of, [*launcher, *part("sums", arguments)], shows=True))


def part(name: str, arguments: Any) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--part", name, *(["--small"] if arguments.small else [])]


# The optimizer's update.


def measure_updates(small: bool) -> None:
    """Print the bandwidth of updates (bytes read and written per second), and of a copy on the device."""
    from mpitrain import optim
    from mpitrain.core.layout import Layout
    from mpitrain.gpu.device import Gpu
    from mpitrain.gpu.update import GpuUpdate

    gpu = Gpu(0, 0.9)
    size = 1 << (14 if small else 27)
    layout = Layout.pack([("all.weight", (size,), "param")])
    with gpu.activate():
        source, copy = gpu.zeros((size,), np.float32), gpu.zeros((size,), np.float32)
        rate = 2 * source.nbytes / seconds_of(gpu, lambda: gpu.compute.copy(source, copy))
        print(f"copy on the device            {rate / 1e9:8,.0f} GB/s read and written", flush=True)
        for optimizer in (
            optim.sgd(0.1),
            optim.momentum(0.1, 0.9),
            optim.adam(0.001),
            optim.adam(0.001, clip_norm=1.0),
        ):
            vectors = {name: gpu.zeros((size,), np.float32) for name in ("params", *optimizer.slots)}
            frozen = np.zeros(len(layout.entries), np.uint8)
            step = GpuUpdate(gpu, optimizer, layout, vectors, None, gpu.copy_of(np.ones(9)), frozen)
            seconds = seconds_of(gpu, lambda step=step: step(source, 3))
            # Every vector is read and written, and the gradient is read. A norm of the gradient needs two more passes.
            passes = 2 * len(vectors) + 1 + (2 if optimizer.needs_sums else 0)
            bandwidth = passes * source.nbytes / seconds
            clipped = ", clipped" if optimizer.needs_sums else ""
            text = f"{bandwidth / 1e9:8,.0f} GB/s  {bandwidth / rate:.0%} of a copy (target 85%)"
            print(f"{optimizer.name + clipped:29} {text}", flush=True)


def seconds_of(gpu: Any, work: Callable[[], object], rounds: int = 20) -> float:
    """Return the median time of one call in seconds."""
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


def measure_sums(small: bool) -> None:
    """Measure a sum through pinned memory, and its parts, on two ranks that share a GPU."""
    from mpitrain.comm.allreduce import MeanAllreduce
    from mpitrain.comm.cluster import Cluster
    from mpitrain.comm.hierarchy import Hierarchy
    from mpitrain.core.ranges import Bucket
    from mpitrain.gpu.allreduce.host import HostTransport
    from mpitrain.gpu.device import Gpu
    from mpitrain.gpu.stream import Stream, pinned
    from mpitrain.plan.config import RunConfig

    size = 1 << (12 if small else 26)
    cluster = Cluster()
    cluster.assign(RunConfig())
    comm = cluster.workers
    hierarchy = Hierarchy(comm, cluster.training.node, cluster.cores)
    gpu = Gpu(0, 0.4)
    with gpu.activate():
        vector, host = gpu.zeros((size,), np.float32), pinned((size,), np.float32)
        second, device, back = Stream(), gpu.zeros((size,), np.float32), pinned((size,), np.float32)
        transport = HostTransport(hierarchy, gpu, [vector], [Bucket(0, size)], leaves=None)
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

        seconds = {work.__name__: slowest(comm, work) for work in (staged, copied, alone, by_mpi)}
    if comm.rank == 0:
        rates = {name: size * 4 / taking / 1e9 for name, taking in seconds.items()}
        print(f"{size * 4 / 2**20:,.0f} MiB on two ranks that share the GPU, GB/s of the vector")
        print(f"  sum through pinned memory          {rates['staged']:7.2f}")
        print(f"  pinned copies in both directions   {rates['copied']:7.2f}")
        print(f"  sum in shared memory, no GPU       {rates['alone']:7.2f}")
        print(f"  MPI_Allreduce in host memory       {rates['by_mpi']:7.2f}")
        slower = min(rates["copied"], rates["by_mpi"])
        share = rates["staged"] / slower
        print(
            f"  the sum reaches {share:.0%} of the slower of pinned copies and MPI_Allreduce (target 80%)", flush=True
        )


def slowest(comm: Any, work: Callable[[], object], rounds: int = 10) -> float:
    """Return the time of the slowest rank in seconds, the median over rounds. Collective over ``comm``."""
    found = []
    for _ in range(rounds + 3):
        comm.Barrier()
        began = time.perf_counter()
        work()
        found.append(max(comm.allgather(time.perf_counter() - began)))
    return statistics.median(found[3:])


PARTS = {"update": measure_updates, "sums": measure_sums}


# Memory.


def memory(arguments: Any) -> bool:
    print(f"{'':40} {'accounted':>10} {'held':>10}   (MiB)")
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), 2_000 if arguments.small else 60_000)
        runs = [run for run in RUNS if not run.flags and arguments.precision in (None, run.precision)]
        results = [succeeded(run.title, partial(print_memory, run, folder, arguments.small)) for run in runs]
    return all(results)


def print_memory(run: Run, folder: str, small: bool) -> None:
    lines, _ = train(run, folder, small, "--train-steps", "20", "--log-steps", "0")
    use = next(line["device_memory"] for line in lines if "device_memory" in line)
    held = use.pop("held")
    accounted = sum(use.values())
    parts = ", ".join(f"{name} {nbytes / 2**20:,.0f}" for name, nbytes in use.items())
    text = f"{accounted / 2**20:10,.1f} {held / 2**20:10,.1f}   {held / accounted - 1:+.1%} (target at most +10%)"
    print(f"{run.title:40} {text}  {parts}", flush=True)


if __name__ == "__main__":
    main()
