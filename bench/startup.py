"""Compares a run of one step with an MPI program that only starts and ends: the time that mpitrain adds.

    python bench/startup.py [ROUNDS] [--job FILE] [--baseline DIR]

Two ranks each, in alternating rounds; both start through the mpirun of this environment. Prints medians and ratios.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOB = ROOT / "jobs" / "mnist_mlp.py"
RANKS = "2"


def seconds(words: list[str], cwd: str | None = None, **environment: str) -> float:
    """Return the duration of a command in seconds; the command must succeed."""
    began = time.perf_counter()
    subprocess.run(words, env={**os.environ, **environment}, cwd=cwd, check=True, capture_output=True)
    return time.perf_counter() - began


def one_step(checkout: Path, job: Path) -> float:
    """Return the seconds of a run of one step with the package of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "-m",
            "mpitrain",
            "run",
            "-n",
            RANKS,
            str(job.resolve()),
            "--train-steps",
            "1",
            "--run-dir",
            f"{folder}/run",
        ]
        # Python imports from the working directory first, which may be this checkout.
        return seconds([sys.executable, *words], folder, PYTHONPATH=str(checkout))


def mpi_alone() -> float:
    """Return the seconds of a program that only starts and ends MPI."""
    mpirun = str(Path(sys.executable).parent / "mpirun")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return seconds([mpirun, "-n", RANKS, sys.executable, "-c", "from mpi4py import MPI"], **root)


def main() -> None:
    """Run all measurements, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int, nargs="?", default=10)
    parser.add_argument("--job", type=Path, default=JOB, help="of the run of one step")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="another checkout")
    given = parser.parse_args()
    checkouts = [ROOT] + ([given.baseline.resolve()] if given.baseline is not None else [])
    for checkout in checkouts:
        one_step(checkout, given.job)  # compiles the kernels and the modules
    alone: list[float] = []
    runs: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
    helps: list[float] = []
    for _ in range(given.rounds):
        alone.append(mpi_alone())
        for checkout, times in runs.items():
            times.append(one_step(checkout, given.job))
        command = shutil.which("mpitrain", path=str(Path(sys.executable).parent))
        helps.append(seconds([str(command), "--help"]))
    base = statistics.median(alone)
    print(f"MPI alone: {base:.2f} s")
    for checkout, times in runs.items():
        median = statistics.median(times)
        print(f"one step, {checkout.name}: {median:.2f} s, {median / base:.2f} times MPI alone")
    print(f"mpitrain --help: {statistics.median(helps):.2f} s")


if __name__ == "__main__":
    main()
