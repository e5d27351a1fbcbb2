"""What virtual workers cost: runs with them beside runs without, in turns.

    python bench/virtual_workers.py [--ranks 2] [--rounds 10] [--models mlp100 cnn]

V = W is compared with the same run without the option, and V = 4 W with ``--accumulate-steps 4`` and micro-batches of
the same size. Printed are the medians of the ratios of examples per second, and their range.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from checkouts import THIS
from environment import one_thread_and_own_kernels, use_this_checkout

MODELS = {
    "mlp100": ("mnist_mlp.py", 100, 40000, []),
    "mlp1024": ("mnist_mlp.py", 100, 3000, ["--hidden-units", "1024"]),
    "cnn": ("fashion_cnn.py", 64, 60, []),
    "gpt": ("torch_gpt.py", 16, 60, []),
}


def speed(ranks: int, model: str, batch: int, steps: int, *flags: str) -> float:
    """Return the examples per second of a run: the median of its reports but the first."""
    job, *_, own = MODELS[model]
    words = [
        "--device",
        "cpu",
        "--threads",
        "1",
        "--validate-steps",
        "0",
        "--save-secs",
        "0",
        "--batch-size",
        str(batch),
    ]
    lines = THIS.train(ranks, job, *words, "--train-steps", str(steps), "--log-steps", str(steps // 10), *own, *flags)
    speeds = [line["examples_per_s"] for line in lines if "examples_per_s" in line]
    return statistics.median(speeds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    use_this_checkout()
    ranks = arguments.ranks
    for model in arguments.models:
        _, batch, steps, _ = MODELS[model]
        pairs = {
            "V = W": ((batch, steps, "--virtual-workers", str(ranks)), (batch, steps)),
            "V = 4 W": (
                (batch, steps // 4, "--virtual-workers", str(4 * ranks)),
                (4 * batch, steps // 4, "--accumulate-steps", "4"),
            ),
        }
        for name, (ours, theirs) in pairs.items():
            ratios = []
            for number in range(arguments.rounds):
                speeds = {}
                for which in (ours, theirs) if number % 2 else (theirs, ours):
                    speeds[which] = speed(ranks, model, *which)
                ratios.append(speeds[ours] / speeds[theirs])
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}, {arguments.rounds} rounds"
            print(f"{model:8} {name:8} {statistics.median(ratios):.3f}  ({spread})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
