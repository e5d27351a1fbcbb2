"""The ratio of a training step's time to the time of its matrix products alone, with 1 and 2 ranks.

    python bench/step.py [--rounds 5] [--models mlp100 ...] [--ranks 1 2] [--data DIR]

Each round runs the products (``bench/peers/products.py``, of the same shapes, in as many processes at once) and the
job, alternating, with one BLAS thread per rank. Prints medians over the rounds, and the median and the range of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from checkouts import THIS
from environment import one_thread_and_own_kernels

ROOT = Path(__file__).parent.parent
BATCH = 100
MODELS = {  # name: (job and flags, steps of a run, target)
    "mlp100": (["mnist_mlp.py", "--hidden-units", "100"], 10_000, 1.5),
    "mlp1024": (["mnist_mlp.py", "--hidden-units", "1024"], 600, 1.15),
    "cnn": (["fashion_cnn.py"], 60, 1.25),  # relative to the products of windows
    "cnn-winograd": (["fashion_cnn.py"], 60, None),  # relative to the products of Winograd's algorithm
    "mlp100-torch": (["../bench/jobs/torch_models.py", "--model", "mlp100"], 4000, None),
}


def step_us(name: str, ranks: int, folder: str) -> float:
    """Return the median time of a step of mpitrain, in microseconds."""
    (job, *flags), steps, _ = MODELS[name]
    if not name.endswith("-torch"):
        flags += ["--data-dir", folder]
    flags += ["--train-steps", str(steps), "--log-steps", str(steps // 10), "--threads", "1"]
    lines = THIS.train(ranks, job, *flags, "--validate-steps", "0")
    rates = [line["examples_per_s"] for line in lines if "examples_per_s" in line][1:]
    return 1e6 * ranks * BATCH / statistics.median(rates)


def products_us(name: str, ranks: int) -> float:
    """Return the median time of the products of a step, in microseconds."""
    steps = MODELS[name][1]
    words = [sys.executable, str(ROOT / "bench" / "peers" / "products.py"), name, str(ranks), str(steps)]
    return float(json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    print(f"{'model':13} {'ranks':>5} {'products, us':>13} {'step, us':>10}   ratio")
    for name in arguments.models:
        for ranks in arguments.ranks:
            pairs = [(products_us(name, ranks), step_us(name, ranks, arguments.data)) for _ in range(arguments.rounds)]
            products, steps = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios = [step / alone for alone, step in pairs]
            target = MODELS[name][2]
            print(
                f"{name:13} {ranks:5} {products:13,.0f} {steps:10,.0f}   {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})" + (f"   target: {target}" if target else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
