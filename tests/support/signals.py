"""Sends one or two signals to ``mpitrain run`` at random moments, in every mode; for more runs, execute:

    python bench/signals.py 50

The MPI library is that of the running Python's environment. If no kernels have been compiled yet, train once before:
signals during the compilation are handled after it.

Each run must end within ten seconds of its signal, leave no process, and leave only intact checkpoints. A run that gets
one signal can be resumed from a checkpoint, unless the signal came before there was anything to save.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from mpitrain import checkpoint
from mpitrain.process import rank_status
from mpitrain.process.signals import STOPPED_EARLY

from .kills import ranks_of
from .launch import JOBS, Mpi
from .waiting import limit, wait_until

MODES = {
    "sync": ["--mode", "sync"],
    "async": ["--mode", "async", "--ps", "1"],
    "ssp": ["--mode", "ssp"],
    "backup": ["--mode", "backup", "--ps", "1", "--no-shared-memory"],
    "local": ["--mode", "local"],
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDS_WITHIN_S = limit(10.0)
FLAGS = ["--no-normalize", "--train-steps", "100000000", "--log-steps", "0", "--validate-steps", "0"]
FLAGS += ["--save-secs", "1", "--keep", "3"]


class Sender:
    """Starts runs of one mode in one run directory, and sends one or two signals to each run.

    Attributes:
        counts: Number of events by name.
        longest_s: Longest time from the last signal to the end, in seconds.
    """

    def __init__(self, mpi: Mpi, mode: str, folder: Path, seed: int) -> None:
        self._mpi, self._mode, self._folder, self._random = mpi, mode, folder, random.Random(f"{mode} {seed}")
        self.counts: Counter[str] = Counter()
        self.longest_s = 0.0

    def send(self, moments: int) -> None:
        for number in range(moments):
            self._life(twice=number % 2 == 1)

    def _life(self, twice: bool) -> None:
        words = [str(self._mpi.python), "-m", "mpitrain", "run", "-n", "3", str(JOBS / "small.py")]
        words += [*MODES[self._mode], *FLAGS, "--run-dir", str(self._folder)]
        before = newest(self._folder)
        with (self._folder.parent / "output").open("w+") as output:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            try:
                began = self._send(process, twice)
                status = process.wait(timeout=limit(60))
            finally:
                process.kill()
            took = time.monotonic() - began[0]
            output.seek(0)
            report = f"{self._mode}, twice: {twice}, ready: {began[1]}, {took:.1f} s, status {status}\n{output.read()}"
        assert took < ENDS_WITHIN_S, report
        # KeyboardInterrupt: the signal came while modules were imported
        assert "Traceback" not in report or (not began[1] and "KeyboardInterrupt" in report), report
        assert not ranks_of(self._folder), report
        self.longest_s = max(self.longest_s, took)
        for path in checkpoint.steps(self._folder / "checkpoints").values():
            checkpoint.verify(path)
            self.counts["checkpoints that verify"] += 1
        self._judge(status, twice, began[1], before, report)

    def _send(self, process: subprocess.Popen[bytes], twice: bool) -> tuple[float, bool]:
        """Send one or two signals; return the time of the last, and whether all ranks were ready before the first."""
        if self._random.random() < 0.3:
            time.sleep(self._random.uniform(0, 2.5))
        else:
            wait_until_ready(self._folder, process)
            time.sleep(self._random.uniform(0, 1.5))
        ready = is_ready(self._folder)
        process.send_signal(self._random.choice(SIGNALS))
        if twice:
            time.sleep(self._random.uniform(0.02, 0.6))
            if process.poll() is None:
                process.send_signal(self._random.choice(SIGNALS))
        return time.monotonic(), ready

    def _judge(self, status: int, twice: bool, ready: bool, before: int, report: str) -> None:
        ended = [128 + number for number in SIGNALS] + [-number for number in SIGNALS]
        after = newest(self._folder)
        assert after >= before, report
        if not twice and ready:
            assert status == STOPPED_EARLY and after > before, report
        elif not twice and before >= 0:
            assert status in (STOPPED_EARLY, *(-number for number in SIGNALS)), report
        else:
            assert status in (STOPPED_EARLY, *ended), report
        self.counts["stopped and saved" if after > before and status == STOPPED_EARLY else "ended at once"] += 1


def newest(run_dir: Path) -> int:
    return max(checkpoint.steps(run_dir / "checkpoints"), default=-1)


def is_ready(run_dir: Path) -> bool:
    entries = rank_status.read(run_dir)
    return len(entries) == 3 and all(entry.ready for entry in entries)


def wait_until_ready(run_dir: Path, process: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: is_ready(run_dir), "the ranks are ready", process=process)


def main(moments: int) -> None:
    for mode in MODES:
        with tempfile.TemporaryDirectory() as folder:
            sender = Sender(Mpi("the environment's", Path(sys.executable)), mode, Path(folder) / "run", seed=moments)
            sender.send(moments)
            counts = ", ".join(f"{count:,} {name}" for name, count in sorted(sender.counts.items()))
            print(f"{mode}: {counts}; the longest end took {sender.longest_s:.1f} s", flush=True)
