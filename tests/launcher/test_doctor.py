"""``mpitrain doctor``: its findings are correct, and it ends even if a rank does not answer."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ..support.launch import Mpi, one_line, run

Findings = dict[str, dict[str, str]]


def read(done: subprocess.CompletedProcess[str]) -> Findings:
    """Return the findings by the name of the check."""
    assert done.stdout.startswith("["), done.stdout + done.stderr
    return {finding["check"]: finding for finding in json.loads(done.stdout)}


def examine(mpi: Mpi, n: int, run_dir: Path, *words: str) -> tuple[int, Findings]:
    done = mpi.run(n, "-m", "mpitrain", "doctor", "--json", "--run-dir", run_dir, *words)
    return done.returncode, read(done)


def test_ranks_are_compared(mpi: Mpi, tmp_path: Path) -> None:
    status, found = examine(mpi, 3, tmp_path / "a" / "runs")
    assert (status, [f for f in found.values() if f["verdict"] == "failure"]) == (0, [])
    assert "on 3 ranks" in found["versions"]["found"]
    host = os.uname().nodename
    oversubscribed = len(os.sched_getaffinity(0)) < 3
    assert (found[f"host {host}"]["verdict"] == "warning") == oversubscribed
    for check in ("mpirun", "shared memory", "within a host", "windows within a host", "save and verify", "locks"):
        assert found[check]["verdict"] == "pass", found[check]
    assert found["over 2 GiB"]["verdict"] in ("pass", "none"), found["over 2 GiB"]
    assert not [*tmp_path.iterdir()], "files of the checks and the folders made for them are left"


def test_matrix_kernels_forced_by_the_environment_are_reported(openmpi: Mpi, tmp_path: Path) -> None:
    """OpenBLAS does not choose the kernels for Sandybridge on CPUs with AVX2."""
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs a processor with AVX2")
    words = [str(openmpi.python), "-m", "mpitrain", "doctor", "-n", "1", "--json", "--run-dir", str(tmp_path)]
    found = read(run(words, env={"OPENBLAS_CORETYPE": "Sandybridge"}))["matrix kernels"]
    assert found["verdict"] == "warning"
    assert "OPENBLAS_CORETYPE=Sandybridge" in found["found"]


def test_alone_it_starts_ranks_itself(mpi: Mpi, tmp_path: Path) -> None:
    done = run([str(mpi.python), "-m", "mpitrain", "doctor", "--json", "--run-dir", str(tmp_path)])
    assert done.returncode == 0
    assert tmp_path.exists(), "the folder existed before"
    assert "on 2 ranks" in read(done)["versions"]["found"]


def test_without_a_launcher_the_rest_is_looked_at(openmpi: Mpi, tmp_path: Path) -> None:
    """The installed launcher fails; all other checks still run."""
    broken = {"PRTE_MCA_prte_default_hostfile": "/nowhere"}
    done = run([str(openmpi.python), "-m", "mpitrain", "doctor", "--json", "--run-dir", str(tmp_path)], env=broken)
    found = read(done)
    assert done.returncode == 1
    assert found["start"]["verdict"] == "failure"
    assert found["save and verify"]["verdict"] == "pass"


def test_a_launcher_of_another_make_is_reported(openmpi: Mpi, mpich: Mpi, tmp_path: Path) -> None:
    words = [*mpich.command(2), str(openmpi.python), "-m", "mpitrain", "doctor", "--json", "--run-dir", str(tmp_path)]
    done = run(words)
    assert done.returncode != 0
    start = done.stdout.index("[")
    world = json.loads(done.stdout[start : done.stdout.rindex("]") + 1])[0]
    assert (world["check"], world["verdict"]) == ("world", "failure")
    assert "mpitrain run" in world["advice"]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="missing: a second core")
def test_ranks_bound_to_one_core_are_reported(openmpi: Mpi, tmp_path: Path) -> None:
    core = str(min(os.sched_getaffinity(0)))
    words = ["taskset", "-c", core, *openmpi.command(2), str(openmpi.python), "-m", "mpitrain", "doctor", "--json"]
    done = run([*words, "--run-dir", str(tmp_path)])
    assert done.returncode == 1
    assert "1 core of" in read(done)["binding"]["found"]


def test_a_folder_that_cannot_be_written_is_reported(openmpi: Mpi) -> None:
    status, found = examine(openmpi, 1, Path("/proc/runs"))
    assert status == 1
    assert "/proc/runs " in found["run directory"]["found"]


def test_a_rank_that_does_not_answer_ends_it(openmpi: Mpi, tmp_path: Path) -> None:
    """One of two ranks is another program, which takes part in no check."""
    sleeper = "from mpi4py import MPI; MPI.COMM_WORLD.Dup(); import time; time.sleep(50)"
    words = [*openmpi.command(1), str(openmpi.python), "-m", "mpitrain", "doctor", "--timeout", "3"]
    words += ["--run-dir", str(tmp_path), ":", "-n", "1", str(openmpi.python), "-c", sleeper]
    done = run(words, timeout=40)
    assert done.returncode == 1
    assert " 3 s " in one_line(done.stderr.replace("mpitrain doctor:", "mpitrain:"))


ONE_FAILS = """
from types import SimpleNamespace
from mpitrain.comm.cluster import Cluster
from mpitrain.doctor import transfers
from mpitrain.comm.mpi import MPI

def fail(*arguments, **named):
    raise MPI.Exception(MPI.ERR_OTHER)

def allocate(*arguments):
    windows.append(Win.Allocate(*arguments))
    return windows[-1] if cluster.rank == 0 else fail()

class Unable:
    def __getattr__(self, name):
        return getattr(cluster.comm, name)

cluster, Win, windows = Cluster(), MPI.Win, []
transfers._LARGE_BYTES, unable = 1 << 22, Unable()
if cluster.rank == 0:
    unable.Send = fail
MPI.Win = SimpleNamespace(Allocate=allocate)
found = [transfers._windows(cluster, "within a host", 1)]
found += [transfers._large(SimpleNamespace(comm=comm), "within a host", 1, 1e9) for comm in (unable, cluster.comm)]
print([finding.verdict for finding in found] == ["warning", "warning", "pass"])
"""


def test_what_fails_on_one_rank_is_found_by_all(openmpi: Mpi) -> None:
    done = openmpi.run(2, "-c", ONE_FAILS, timeout=20)
    assert done.stdout.count("True") == 2, done.stdout + done.stderr
