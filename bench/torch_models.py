"""PyTorch modules trained by mpitrain, against DistributedDataParallel and against plain torch loops.

    python bench/torch_models.py [--rounds 5] [--models mlp100 gpt ...] [--optimizers RMSprop AdamW ...]

Each round runs every program once, in turn, with one thread per rank:

- mpitrain with 2 ranks and with 1 rank;
- a Trainer's loop with 2 ranks;
- DDP over gloo with 2 ranks;
- two plain loops that do not communicate, and one plain loop.

All use the same module, Adam and the same data; the peers use PyTorch's fused Adam. For ``mlp100m``, DDP uses the best
of several bucket sizes, measured before the first round. A result is the median over rounds of the median over a run's
intervals. With ``--optimizers``, the job uses these optimizers of torch, and is compared with DDP with and without
``ZeroRedundancyOptimizer``. Start-up and compilation are excluded for all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from environment import one_thread_and_own_kernels
from jobs.torch_models import OPTIMIZERS

BENCH = Path(__file__).parent
STEPS = {"mlp100": 6000, "mlp1024": 600, "mlp100m": 20, "cnn": 300, "gpt": 60}
BATCH = {"mlp100": 100, "mlp1024": 100, "mlp100m": 32, "cnn": 64, "gpt": 16}
TARGETS = {"mlp100": 3.5, "mlp1024": 2.0, "mlp100m": 2.5, "cnn": 1.2, "gpt": 1.2}
BUCKETS_MB = ("1", "25", "100", "500")


def ours(name: str, ranks: int, loop: bool = False, optimizer: str = "") -> tuple[float, float]:
    """Run a job, or a ``loop`` with a Trainer; return examples/s and the memory of all ranks in bytes (a loop: 0)."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        words = [sys.executable, "-m", "mpitrain", "run", "-n", str(ranks)]
        steps = ["--model", name, "--train-steps", str(STEPS[name])]
        environment = {**os.environ, "PSS_FOLDER": folder, "PYTHONPATH": str(BENCH.parent)}
        flags = ["--threads", "1", "--run-dir", str(run_dir), "--log-steps", str(max(1, STEPS[name] // 10))]
        job_file = BENCH / "jobs" / ("torch_models_loop.py" if loop else "torch_models.py")
        if optimizer:
            steps += ["--optimizer", optimizer]
        subprocess.run([*words, *flags, str(job_file), *steps], env=environment, stdout=subprocess.DEVNULL, check=True)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        rates = [line["examples_per_s"] for line in lines if "examples_per_s" in line]
        memory = sum(int(path.read_text()) for path in Path(folder).iterdir() if path.is_file())
    return statistics.median(rates[1:]), memory


def peer(name: str, ranks: int, how: str, *optimizer: str) -> tuple[float, float]:
    """Return examples/s and memory in bytes, as ``ours`` does, of a plain loop, or of DDP with a bucket size."""
    words = [
        sys.executable,
        str(BENCH / "peers" / "torch_models.py"),
        name,
        str(ranks),
        str(STEPS[name]),
        how,
        *optimizer,
    ]
    environment = {**os.environ, "PYTHONPATH": str(BENCH.parent)}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return statistics.median(found["rates"]), found["memory"]


def measure(name: str, rounds: int) -> None:
    """Print the figures of one module."""
    bucket = max(BUCKETS_MB, key=lambda size: peer(name, 2, size)[0]) if name == "mlp100m" else "25"
    programs = {
        "ours2": lambda: ours(name, 2),
        "ddp": lambda: peer(name, 2, bucket),
        "alone2": lambda: peer(name, 2, "alone"),
        "loop2": lambda: ours(name, 2, loop=True),
        "ours1": lambda: ours(name, 1),
        "alone1": lambda: peer(name, 1, "alone"),
    }
    speeds, memory = defaultdict(list), defaultdict(list)
    for _ in range(rounds):
        for key, program in programs.items():
            rate, used = program()
            speeds[key].append(rate)
            memory[key].append(used)
    rate = {key: statistics.median(found) for key, found in speeds.items()}
    used = {key: statistics.median(found) / 2**20 for key, found in memory.items()}
    extra_us = 1e6 * BATCH[name] * (1 / rate["ours1"] - 1 / rate["alone1"])
    print(
        f"{name:8} examples/s: 2 ranks {rate['ours2']:,.0f}, DDP {rate['ddp']:,.0f} (buckets of {bucket} MB), "
        f"two loops {rate['alone2']:,.0f}, 1 rank {rate['ours1']:,.0f}, one loop {rate['alone1']:,.0f}\n"
        f"         {rate['ours2'] / rate['ddp']:.2f} x DDP (target {TARGETS[name]} x); "
        f"{rate['ours2'] / rate['alone2']:.2f} of two loops; "
        f"a Trainer's loop: {rate['loop2'] / rate['ours2']:.2f} of the job; "
        f"1 rank: {rate['ours1'] / rate['alone1']:.2f} of one loop, {extra_us:+,.0f} us per step; "
        f"memory of 2 ranks: {used['ours2']:,.0f} MiB, DDP {used['ddp']:,.0f} MiB",
        flush=True,
    )


def measure_optimizer(name: str, optimizer: str, rounds: int) -> None:
    """Print the figures of one module with an optimizer of torch."""
    programs = {
        "ours": lambda: ours(name, 2, optimizer=optimizer),
        "ddp": lambda: peer(name, 2, "25", optimizer),
        "zero": lambda: peer(name, 2, "25", optimizer, "zero"),
    }
    found = defaultdict(list)
    for _ in range(rounds):
        for key, program in programs.items():
            found[key].append(program())
    rate, used = ({key: statistics.median(pair[i] for pair in found[key]) for key in programs} for i in (0, 1))
    print(
        f"{name:8} {optimizer:9} examples/s: {rate['ours']:,.0f}, DDP {rate['ddp']:,.0f}, "
        f"with ZeroRedundancyOptimizer {rate['zero']:,.0f}: {rate['ours'] / max(rate['ddp'], rate['zero']):.2f} x; "
        f"memory {used['ours'] / 2**20:,.0f}, {used['ddp'] / 2**20:,.0f} and {used['zero'] / 2**20:,.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--optimizers", nargs="*", default=[], choices=list(OPTIMIZERS))
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    for name in arguments.models:
        for optimizer in arguments.optimizers:
            measure_optimizer(name, optimizer, arguments.rounds)
        if not arguments.optimizers:
            measure(name, arguments.rounds)


if __name__ == "__main__":
    main()
