"""Runs in which nothing hangs, but one operation takes long: the watchdog must not report any run.

    python bench/undisturbed.py [MINUTES] [--at-once N]

Each run has default settings, three ranks and a random mode. A random operation is slow: the start, a step, a hook, the
validation or a save. A step takes 0.75 times the shortest default limit of --hang-timeout. The other operations have
longer limits, and take 1.5 times this limit. Prints one line per run, and a summary. N runs at once load the machine.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults import MODES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mpitrain.process.watchdog import SHORTEST_LIMIT_S  # noqa: E402

JOB = ROOT / "tests" / "support" / "jobs" / "patient.py"
LONG_S, SHORT_S = 1.5 * SHORTEST_LIMIT_S, 0.75 * SHORTEST_LIMIT_S
SLOW = {"none": 0.0, "start": LONG_S, "step": SHORT_S, "hook": LONG_S, "validation": LONG_S, "save": LONG_S}
REPORTS = ("made no progress", "does not answer", "has not answered", "cannot finish", "is stopped")


def undisturbed(mode: str, slow: str, rank: int, folder: Path) -> tuple[bool, float, str]:
    """Run once; return whether the run succeeded without a report of a hang, its seconds, and its stderr."""
    words = [str(JOB), "--slow", slow, "--seconds", str(SLOW[slow]), "--rank", str(rank), "--run-dir", str(folder)]
    words += ["--validate-steps", "30", "--save-steps", "20", *MODES[mode]]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "mpitrain", "run", "-n", "3", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    right = done.returncode == 0 and not any(report in done.stderr for report in REPORTS)
    return right, time.monotonic() - began, done.stderr


def main() -> None:
    """Run for some minutes, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float, nargs="?", default=5.0)
    parser.add_argument("--at-once", type=int, default=2, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes

    def run_in_turn(worker: int) -> list[bool]:
        draw, results = random.Random(given.seed * 1000 + worker), []
        while time.monotonic() < until:
            mode, slow = draw.choice(list(MODES)), draw.choice(list(SLOW))
            rank = draw.randrange(1 if "--ps" in MODES[mode] else 0, 3)  # a server calls no layer and no hook
            right, seconds, error = undisturbed(mode, slow, rank, Path(folder, f"{worker}-{len(results)}"))
            results.append(right)
            print(f"{mode:6} slow {slow:10} rank {rank}  {seconds:6.1f} s  {'ok' if right else error!r}", flush=True)
        return results

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.at_once) as threads:
        found = [right for results in threads.map(run_in_turn, range(given.at_once)) for right in results]
    print(f"{sum(found)} of {len(found)} runs finished without a report, in {given.minutes:g} minutes")


if __name__ == "__main__":
    main()
