"""Accuracy with compressed gradients, against the accuracy of the same steps without compression.

    python bench/compression.py [--jobs mnist_mlp momentum_mlp fashion_cnn] [--seeds 3]

Fashion-MNIST. Memory is not shared, so that every rank counts as a node; speed is measured by ``links.py``. With a
server, every worker sends to another node. Prints the mean accuracy over the seeds, and the difference from the
accuracy without compression in percentage points. For ``sync``, it also prints the bytes between nodes as a fraction of
the bytes without compression.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import one_thread_and_own_kernels

ROOT = Path(__file__).parents[1]
DATA = "/usr/share/datasets/fashion-mnist"
JOBS = {
    "mnist_mlp": ROOT / "jobs" / "mnist_mlp.py",
    "momentum_mlp": ROOT / "bench" / "jobs" / "momentum_mlp.py",
    "fashion_cnn": ROOT / "jobs" / "fashion_cnn.py",
}
STEPS = {"mnist_mlp": 3000, "momentum_mlp": 3000, "fashion_cnn": 1200}
SYNC = ["", "bfloat16", "int8", "powersgd:4", "powersgd:4 --compress-after 100"]
SERVED = ["", "int8", "topk:0.01"]


def train(job: str, seed: int, ranks: int, flags: list[str]) -> tuple[float, float]:
    """Return the last validation accuracy, and the sent fraction of the bytes between nodes; NaN if none were sent."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "mpitrain", "run", "-n", str(ranks), "--threads", "1", "--no-shared-memory"]
        words += [*flags, "--seed", str(seed), "--validate-steps", "0", "--run-dir", f"{folder}/run"]
        words += [str(JOBS[job]), "--data-dir", DATA, "--train-steps", str(STEPS[job])]
        words += ["--filters", "8"] if job == "fashion_cnn" else []
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    sent, saved = (sum(line.get(name, 0) for line in lines) for name in ("internode_bytes", "saved_bytes"))
    accuracy = [line["validation_accuracy"] for line in lines if "validation_accuracy" in line][-1]
    return accuracy, sent / (sent + saved) if sent else float("nan")


def measure(title: str, job: str, seeds: int, ranks: int, flags: list[str], codecs: list[str]) -> None:
    print(f"\n{job}, {STEPS[job]:,} steps, {title}, {seeds} seeds")
    reference = 0.0
    for codec in codecs:
        words = [*flags, *(["--compress", *codec.split()] if codec else [])]
        runs = [train(job, seed, ranks, words) for seed in range(seeds)]
        accuracies = [100 * accuracy for accuracy, _ in runs]
        mean = statistics.mean(accuracies)
        reference = reference or mean
        spread = f"{min(accuracies):.2f} to {max(accuracies):.2f}"
        sent = f"{runs[0][1]:.3f} of the bytes" if codec and runs[0][1] == runs[0][1] else ""
        print(f"{codec or 'uncompressed':34} {mean:6.2f} %  {mean - reference:+.2f}  ({spread})  {sent}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    for job in arguments.jobs:
        measure("sync, 2 workers", job, arguments.seeds, 2, [], SYNC)
        measure("async, 2 workers, 1 server", job, arguments.seeds, 3, ["--mode", "async", "--ps", "1"], SERVED)


if __name__ == "__main__":
    main()
