"""Training with 1 server and 2 workers on one host: mpitrain against TensorFlow's parameter servers.

    python bench/async.py [--rounds 3] [--tensorflow .venv-tensorflow/bin/python] [--data DIR]
    python bench/async.py --baseline DIR --rounds 10

Fashion-MNIST, 784-100-10, Adam, batch 100 per worker; global steps/s. Each round runs every program once, alternating.
A result is the median over rounds of the median over a run's intervals. ``sync`` has no server; ``backup`` without
spare workers computes the same with a server.
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
OURS = {  # name: (ranks, flags)
    "async": (3, ["--mode", "async", "--ps", "1"]),
    "backup": (3, ["--mode", "backup", "--backup-workers", "0", "--ps", "1"]),
    "sync": (2, ["--mode", "sync"]),
}
PAIRS = [("async", "async", 6.0), ("backup", "sync", 10.0), ("sync", "sync", 10.0)]  # ours, TensorFlow's, target


def ours(name: str, folder: str, checkout: Checkout = THIS, hidden_units: int = 100) -> float:
    ranks, flags = OURS[name]
    steps = (8000 if name == "async" else 4000) * 100 // hidden_units
    flags = [*flags, "--data-dir", folder, "--train-steps", str(steps), "--log-steps", str(steps // 8)]
    flags += ["--hidden-units", str(hidden_units), "--validate-steps", "0", "--threads", "1"]
    lines = checkout.train(ranks, "mnist_mlp.py", *flags)
    return statistics.median([1 / line["step_s"] for line in lines if "step_s" in line][1:])


def peer(mode: str, folder: str, python: str) -> float:
    steps = 3200 if mode == "async" else 1600
    words = [python, str(ROOT / "bench" / "peers" / "tf_servers.py"), mode, str(steps), folder]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensorflow", default=str(ROOT / ".venv-tensorflow" / "bin" / "python"))
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="compare with another checkout instead")
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    if arguments.baseline is not None:
        for units in (100, 1024):
            compare(
                f"async, {units} units",
                Checkout(arguments.baseline.resolve()),
                lambda checkout, units=units: [ours("async", arguments.data, checkout, units)],  # type: ignore[misc]
                arguments.rounds,
            )
        return
    figures: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for name in OURS:
            figures[name].append(ours(name, arguments.data))
        for mode in ("async", "sync"):
            figures[f"tf {mode}"].append(peer(mode, arguments.data, arguments.tensorflow))
    print(f"{'mpitrain':10} {'steps/s':>8}   {'TensorFlow':12} {'steps/s':>8}   ratio")
    for name, mode, wanted in PAIRS:
        speed, tf_speed = statistics.median(figures[name]), statistics.median(figures[f"tf {mode}"])
        print(f"{name:10} {speed:8,.0f}   {mode:12} {tf_speed:8,.0f}   {speed / tf_speed:5.2f}x   target {wanted:.0f}x")


if __name__ == "__main__":
    main()
