"""One worker slowed down tenfold: the remaining steps/s in sync, backup and async.

    python bench/stragglers.py [--rounds 3] [--compute-ms 20]

Four workers. Each step of a small model sleeps for some milliseconds, which simulates computation on one accelerator
per worker. The slow worker sleeps ten times as long. (With real computation on shared cores, the other workers would
speed up while one waits.) Each round runs every program once, alternating.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from environment import one_thread_and_own_kernels

ROOT = Path(__file__).parent.parent
MODES = {
    "sync": ["--mode", "sync"],
    "backup": ["--mode", "backup", "--backup-workers", "1"],
    "async": ["--mode", "async"],
}
WORKERS = 4


def steps_per_s(mode: str, compute_ms: float, slow: bool) -> float:
    """Return steps/s. A run of ``sync`` with a slow worker has fewer steps, because each step takes longer."""
    steps = 40 if mode == "sync" and slow else 160 * (4 if mode == "async" else 1)
    with tempfile.TemporaryDirectory() as run_dir:
        words = [sys.executable, "-m", "mpitrain", "run", "-n", str(WORKERS), str(ROOT / "bench" / "peers" / "slow.py")]
        words += ["--compute-ms", str(compute_ms), "--slow-worker", "3" if slow else "-1", *MODES[mode]]
        words += ["--train-steps", str(steps), "--log-steps", str(steps // 8), "--validate-steps", "0"]
        words += ["--threads", "1", "--run-dir", run_dir]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([1 / line["step_s"] for line in lines if "step_s" in line][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compute-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    one_thread_and_own_kernels()
    figures: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for mode in MODES:
            for slow in (False, True):
                figures[mode, slow].append(steps_per_s(mode, arguments.compute_ms, slow))
    print(f"{WORKERS} workers, {arguments.compute_ms:g} ms per step; steps/s")
    print(f"{'mode':8} {'none slow':>11} {'one slow':>11}   remaining")
    for mode in MODES:
        free, slowed = (statistics.median(figures[mode, slow]) for slow in (False, True))
        # In async, the other workers are not expected to do the slow worker's share.
        others = free * (WORKERS - 1) / WORKERS if mode == "async" else free
        wanted = "" if mode == "sync" else "   target 80 %"
        of = " of the other workers' combined rate" if mode == "async" else ""
        print(f"{mode:8} {free:11,.1f} {slowed:11,.1f}   {slowed / others:.0%}{of}{wanted}")


if __name__ == "__main__":
    main()
