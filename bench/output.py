"""The way of a rank's output to the reader of ``mpitrain run``: latency of lines and of parts of lines, and 100 MB.

    python bench/output.py [ROUNDS] [--baseline DIR] [--ranks 1]

Measures this checkout and another one, in turns. Prints medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRITES = "import os, time\nfor i in range(30):\n    os.write(1, b'%r{0}' % time.time())\n    time.sleep(0.15)\n"
LINES = "import sys\nline = 'x' * 99 + '\\n'\nfor i in range(1_000_000):\n    sys.stdout.write(line)\n"


def command(checkout: Path, folder: str, ranks: int, code: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs Python code on ranks, and its environment."""
    start = [sys.executable, "-P", "-m", "mpitrain", "run", "-n", str(ranks), "--run-dir", f"{folder}/run"]
    return [*start, "--", sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(checkout)}


def latency_s(checkout: Path, end: str) -> float:
    """Return the median time from a write of a rank, which ends with ``end``, until it has arrived."""
    with tempfile.TemporaryDirectory() as folder:
        words, environment = command(checkout, folder, 1, WRITES.format(end))
        found = []
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            while data := os.read(process.stdout.fileno(), 1000):
                found += [time.time() - float(part) for part in data.split()]
        return statistics.median(found)


def seconds(checkout: Path, ranks: int, code: str) -> float:
    """Return the duration of a run whose output is read at once."""
    with tempfile.TemporaryDirectory() as folder:
        words, environment = command(checkout, folder, ranks, code)
        began = time.perf_counter()
        subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=True)
        return time.perf_counter() - began


def main() -> None:
    """Run all measurements, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="another checkout")
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    checkouts = [ROOT] + ([given.baseline.resolve()] if given.baseline is not None else [])
    for name, unit, measure in (
        ("a line", "ms", lambda checkout: 1e3 * latency_s(checkout, "\\n")),
        ("a part of a line", "ms", lambda checkout: 1e3 * latency_s(checkout, " ")),
        ("100 MB in lines", "s", lambda checkout: seconds(checkout, given.ranks, LINES)),
        ("no output", "s", lambda checkout: seconds(checkout, given.ranks, "pass")),
    ):
        found: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
        for _ in range(given.rounds):
            for checkout, values in found.items():
                values.append(measure(checkout))
        text = ", ".join(f"{checkout}: {statistics.median(values):.2f} {unit}" for checkout, values in found.items())
        print(f"{name:17} {text}", flush=True)


if __name__ == "__main__":
    main()
