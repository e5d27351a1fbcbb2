"""The cost of saving 1 GiB for the training loop, blocking and in the background.

    python bench/background_save.py [--threads 1] [--examples 16] [--every 20] [--rounds 3] [--saves 4]

The cost of a save is the time of the steps from one save to the next save, minus the time of the same number of steps
without a save. The median of the second half of the steps, when the save should have finished, is the time of a step
without a save. Each round does a blocking and a background run, alternating. A result is the median over all saves. The
machine should be idle. If ``--threads`` is less than the number of cores of a rank, a core is free for saving.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def costs(arguments: argparse.Namespace, flag: str) -> tuple[list[float], float]:
    """Return the cost of each save of a run, and the run's median step time without a save, in seconds."""
    every, threads = arguments.every, arguments.threads
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        times = Path(temporary) / "times.json"
        flags = {
            "times": times,
            "run-dir": temporary,
            "save-steps": every,
            "train-steps": every * (arguments.saves + 1),
        }
        flags |= {"examples": arguments.examples, "validate-steps": 0, "log-steps": 0}
        flags |= {} if threads is None else {"threads": threads}
        words = [sys.executable, "-m", "mpitrain", "run", "-n", str(arguments.ranks)]
        words += [str(ROOT / "bench/jobs/large_state.py"), flag]
        words += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        seconds = json.loads(times.read_text())
    # Leave out the first save, which touches the memory of its copy for the first time.
    windows = [seconds[start : start + every] for start in range(2 * every - 1, len(seconds) - every, every)]
    usual = [statistics.median(window[every // 2 :]) for window in windows]
    return [sum(window) - every * step for window, step in zip(windows, usual, strict=True)], statistics.median(usual)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, help="BLAS threads per rank  [default: its share of the cores]")
    parser.add_argument(
        "--examples", type=int, default=16, help="examples per step; more examples mean longer computation"
    )
    parser.add_argument("--every", type=int, default=20, help="steps between saves")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--folder", help="folder on the disk to measure  [default: a temporary folder]")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {"--no-save-background": [], "--save-background": []}
    steps: list[float] = []
    for _ in range(arguments.rounds):
        for flag, all_costs in found.items():
            some, step = costs(arguments, flag)
            all_costs += some
            steps.append(step)
    blocking, background = (statistics.median(values) for values in found.values())
    print(f"{arguments.ranks} rank(s), one step takes {statistics.median(steps):.3f} s without a save")
    for name, values in zip(("blocking", "background"), found.values(), strict=True):
        print(f"{name:16} {statistics.median(values):6.3f} s per save   ({min(values):.3f} to {max(values):.3f})")
    print(f"saving in the background costs {background / blocking:.0%} of blocking   target below 10%")


if __name__ == "__main__":
    main()
