"""Training on Fashion-MNIST: mpitrain with 2 ranks against PyTorch DistributedDataParallel, and against 1 rank.

    python bench/sync.py [--rounds 5] [--torch .venv-torch/bin/python] [--data DIR]
    python bench/sync.py --baseline DIR --rounds 10 --models mlp100 mlp1024

Each round runs every program once, alternating, with one BLAS thread per rank. A result is the median over rounds of
the median over a run's intervals. Start-up, compilation and validation are excluded for all programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path

from checkouts import THIS, Checkout, compare
from environment import one_thread_and_own_kernels

ROOT = Path(__file__).parent.parent
MODELS = {  # name: (job and flags, steps of a run)
    "mlp100": (["mnist_mlp.py", "--hidden-units", "100"], 20_000),
    "mlp1024": (["mnist_mlp.py", "--hidden-units", "1024"], 600),
    "cnn": (["fashion_cnn.py"], 100),
}
TARGETS = {"mlp100": 7.0, "mlp1024": 3.0, "cnn": 1.0}


def ours(name: str, ranks: int, folder: str, checkout: Checkout = THIS) -> float:
    (job, *flags), steps = MODELS[name]
    flags += ["--data-dir", folder, "--train-steps", str(steps), "--log-steps", str(steps // 10), "--threads", "1"]
    lines = checkout.train(ranks, job, *flags, "--validate-steps", "0")
    return statistics.median([line["examples_per_s"] for line in lines if "examples_per_s" in line][1:])


def peer(name: str, ranks: int, folder: str, python: str) -> float:
    steps = max(60, MODELS[name][1] // 4)
    words = [python, str(ROOT / "bench" / "peers" / "ddp.py"), name, str(ranks), str(steps), folder]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True)
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch", default=str(ROOT / ".venv-torch" / "bin" / "python"))
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="compare with another checkout instead")
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    if arguments.baseline is not None:
        for name in arguments.models:
            compare(
                name,
                Checkout(arguments.baseline.resolve()),
                lambda checkout, name=name: [ours(name, 2, arguments.data, checkout)],  # type: ignore[misc]
                arguments.rounds,
            )
        return
    print(f"{'model':8} {'1 rank':>10} {'2 ranks':>10} {'DDP, 2':>10}   {'vs DDP':>7}   efficiency   (examples/s)")
    for name in arguments.models:
        figures: dict[str, list[float]] = defaultdict(list)
        for _ in range(arguments.rounds):
            figures["one"].append(ours(name, 1, arguments.data))
            figures["peer"].append(peer(name, 2, arguments.data, arguments.torch))
            figures["two"].append(ours(name, 2, arguments.data))
        one, two, ddp = (statistics.median(figures[key]) for key in ("one", "two", "peer"))
        print(
            f"{name:8} {one:10,.0f} {two:10,.0f} {ddp:10,.0f}   {two / ddp:6.2f}x   {two / (2 * one):10.1%}"
            f"   target {TARGETS[name]:.0f}x and 85%",
            flush=True,
        )


if __name__ == "__main__":
    main()
