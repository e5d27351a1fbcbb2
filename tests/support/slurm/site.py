"""Jobs submitted to the test cluster, as its user sees them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..launch import ROOT, Mpi, run
from .cluster import Cluster

# Messages of ranks on a busy machine when the job ends before the run begins. Causes: Slurm 22.05's plugin does not
# connect its daemons, or Open MPI receives a message before its own fence has ended (pull request 13559 of Open MPI).
_STARTUP_ERRORS = ("Cannot establish the connection", "mca_pml_ob1_recv_frag_callback_match")


def startup_failed(log: str) -> bool:
    """Return whether MPI has failed before the run has begun."""
    return any(error in log for error in _STARTUP_ERRORS)


@dataclass(frozen=True)
class Submitted:
    """A submitted job and the output of the command that submitted it."""

    number: str
    run_dir: Path
    output: str

    def log(self) -> str:
        """Return the job's output; for an array, the output of all tasks."""
        return "".join(path.read_text() for path in sorted((self.run_dir / "batch").glob("*.log")))


class Site:
    """A user's view of the cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def environment(self, mpi: Mpi) -> dict[str, str]:
        """Return the environment variables of a login shell in which the Python environment of ``mpi`` is active."""
        path = f"{mpi.python.parent}:{os.environ['PATH']}"
        # There are more ranks than cores; Open MPI's busy waiting would take CPU time from other ranks.
        return {**self.cluster.environment, "PATH": path, "OMPI_MCA_mpi_yield_when_idle": "1"}

    def call(self, mpi: Mpi, *words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """Execute ``mpitrain submit WORDS`` as a user would."""
        command = [str(mpi.python), "-m", "mpitrain", "submit", *map(str, words)]
        return run(command, timeout=60, env=self.environment(mpi), cwd=cwd)

    def submit(self, mpi: Mpi, name: str, *words: str | Path) -> Submitted:
        """Submit a job with the run directory ``name``; Slurm must accept the job."""
        run_dir = self.folder / name
        done = self.call(mpi, "--run-dir", run_dir, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.match(r"job (\d+): ", done.stdout)
        assert found, done.stdout
        return Submitted(found[1], run_dir, done.stdout)

    def script(
        self, mpi: Mpi, script: str | Path, *words: str, cwd: Path | None = None, flags: Sequence[str] = ()
    ) -> str:
        """Submit a script of the folder ``slurm``, or another script, from ``cwd``; return the job's number.

        Args:
            words: Arguments of the script.
            flags: Flags of ``sbatch``.
        """
        command = ["sbatch", "--parsable", *flags, str(ROOT / "slurm" / script), *words]
        done = run(command, env=self.environment(mpi), cwd=cwd or self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
