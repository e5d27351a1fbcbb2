"""Preemption and time limits of a Lightning run on a real Slurm cluster of two nodes, which this script starts.

    python bench/lightning_preemption.py

Needs root, Debian's Slurm, and an environment with mpitrain, torch and lightning. The script
programs/lightning_preempted.py trains on two nodes. A job of another partition preempts it: unchanged, with lines that
exit with status 75, and with a callback. With the callback, it is also asked to stop before its time limit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from environment import one_thread_and_own_kernels, use_this_checkout

use_this_checkout()
from tests.support.slurm.cluster import ENDED, Cluster, make_cluster  # noqa: E402

SCRIPT = Path(__file__).parent / "programs" / "lightning_preempted.py"
EPOCHS = "8"  # of 40 steps of 0.05 s


class Job:
    """A submitted job."""

    def __init__(self, cluster: Cluster, folder: Path, how: str, *flags: str) -> None:
        self.cluster, self.folder = cluster, folder
        folder.mkdir()
        words = ["--run-dir", str(folder / "run"), "--nodes", "2", *flags, "--", "python", str(SCRIPT), EPOCHS, how]
        environment = {**os.environ, **cluster.environment, "OMPI_MCA_mpi_yield_when_idle": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = [sys.executable, "-m", "mpitrain", "submit", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        found = re.match(r"job (\d+): ", done.stdout)
        assert found, done.stdout + done.stderr
        self.number = found[1]

    def log(self) -> str:
        return "".join(path.read_text() for path in (self.folder / "run" / "batch").glob("*.log"))

    def wait_for(self, text: str, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.log():
            assert time.monotonic() < deadline and self.cluster.state_of(self.number) not in ENDED, self.log()
            time.sleep(0.1)

    def end(self) -> str:
        """Return the final state; a requeued job is started without Slurm's waiting time of two minutes."""
        deadline = time.monotonic() + 150
        while (state := self.cluster.state_of(self.number)) not in ENDED:
            assert time.monotonic() < deadline, self.log()
            if state == "PENDING" and self.cluster.restarts(self.number):
                time.sleep(2)
                self.cluster.call("scontrol", "update", f"jobid={self.number}", "starttime=now", check=False)
            time.sleep(0.5)
        return state

    def report(self, what: str) -> str:
        """Wait for the end, print a summary, and return ``finished`` or ``not finished``."""
        state, log = self.end(), self.log()
        begun = [int(step) for step in re.findall(r"^rank 0: training begins in step (\d+)", log, re.MULTILINE)]
        finished = re.findall(r"^finished in step (\d+)", log, re.MULTILINE)
        print(
            f"{what}: job {state}, {self.cluster.restarts(self.number)} requeues, training began in steps {begun}, "
            f"{'finished in step ' + finished[0] if finished else 'NOT FINISHED'}",
            flush=True,
        )
        if "-v" in sys.argv:
            print(log)
        return "finished" if finished else "not finished"


def main() -> None:
    one_thread_and_own_kernels()
    versions = ", ".join(f"{name} {version(name)}" for name in ("lightning", "torch"))
    print(f"bench/lightning_preemption.py, {time.strftime('%d %B %Y')}, {versions}.", flush=True)
    with tempfile.TemporaryDirectory() as name, make_cluster(nodes=2) as cluster:
        folder, found = Path(name), []
        ways = ("unchanged", "mpirun"), ("status75", "mpirun"), ("callback", "mpirun"), ("callback", "srun")
        for how, launcher in ways:
            flags = ["--launcher", launcher, "--partition", "low", "--time", "5"]
            job = Job(cluster, folder / f"preempted-{how}-{launcher}", how, *flags)
            job.wait_for("step 60")
            taker = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
            cluster.call("sbatch", *taker)
            found.append((how, job.report(f"preempted, {launcher}, {how}")))
        limited = Job(cluster, folder / "limited", "callback", "--time", "1", "--stop-secs", "42")
        found.append(("callback", limited.report("time limit, mpirun, callback")))
    sys.exit(any(how == "callback" and end != "finished" for how, end in found))


if __name__ == "__main__":
    main()
