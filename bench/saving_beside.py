"""What a save of 1 GiB costs the training loop, blocking and beside training.

    python bench/saving_beside.py [--ranks 1] [--threads 1] [--rounds 3] [--saves 4] [--folder DIR]

A save's cost is the time of the steps from one save to the next, less as many median steps of the second half of
that time, when the save has ended. In each round a blocking run and one that saves beside training take turns; a figure
is the median over all saves. Needs a machine on which nothing else runs; with ``--threads`` below the cores of a rank
one is to spare for the save.
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
EVERY = 20  # steps between saves


def costs(ranks: int, threads: int | None, flag: str, saves: int, folder: str | None) -> tuple[list[float], float]:
    """Seconds that each save cost a run, and its median step without one."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        times = Path(made) / "times.json"
        words = [sys.executable, "-m", "mpitrain", "run", "-n", str(ranks), str(ROOT / "bench/jobs/large_state.py")]
        words += ["--times", str(times), "--run-dir", made, "--save-steps", str(EVERY), flag]
        words += ["--train-steps", str(EVERY * (saves + 1)), "--validate-steps", "0", "--log-steps", "0"]
        words += [] if threads is None else ["--threads", str(threads)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        seconds = json.loads(times.read_text())
    # The first save touches the memory of its copy for the first time, and is left out.
    windows = [seconds[start : start + EVERY] for start in range(2 * EVERY - 1, len(seconds) - EVERY, EVERY)]
    usual = [statistics.median(window[EVERY // 2 :]) for window in windows]
    return [sum(window) - EVERY * step for window, step in zip(windows, usual, strict=True)], statistics.median(usual)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of a rank's BLAS  [default: its share of the cores]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--folder", help="on the disk to measure  [default: a temporary folder]")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {"--no-save-background": [], "--save-background": []}
    steps: list[float] = []
    for _ in range(arguments.rounds):
        for flag, all_costs in found.items():
            some, step = costs(arguments.ranks, arguments.threads, flag, arguments.saves, arguments.folder)
            all_costs += some
            steps.append(step)
    blocking, beside = (statistics.median(values) for values in found.values())
    print(f"{arguments.ranks} rank(s), a step takes {statistics.median(steps):.3f} s without a save")
    for name, values in zip(("blocking", "beside training"), found.values(), strict=True):
        print(f"{name:16} {statistics.median(values):6.3f} s a save   ({min(values):.3f} to {max(values):.3f})")
    print(f"beside training costs {beside / blocking:.0%} of blocking   wanted under 10%")


if __name__ == "__main__":
    main()
