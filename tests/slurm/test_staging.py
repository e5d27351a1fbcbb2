"""Copies of the Python environment on the nodes of a job: every node has a /dev/shm of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..support.environments import PROGRAM, make_environment
from ..support.launch import Mpi, run
from ..support.slurm.site import Site, startup_failed

DISK = "/dev/shm"
STARTS = {
    "run": "PYTHON -m mpitrain run --run-dir run --stage-env DISK program.py",
    "chosen": "PYTHON -m mpitrain run --run-dir run --launcher-args '--map-by node' --stage-env DISK program.py",
    "srun": """
        python=$(srun --mpi=pmix --ntasks-per-node 1 PYTHON -m mpitrain stage DISK) || exit
        PATH=${python%/*}:$PATH srun --mpi=pmix "$python" program.py
    """,
}


@pytest.mark.parametrize("kind", STARTS)
def test_ranks_start_from_the_copies_of_their_nodes(site: Site, openmpi: Mpi, kind: str) -> None:
    folder = site.folder / f"staging-{kind}"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    own = make_environment(folder / "env", openmpi)
    script = STARTS[kind].replace("PYTHON", str(own.python)).replace("DISK", DISK)
    words = ["--nodes=2", "--ntasks-per-node=1", f"--output={folder}/log", "--wrap", script]
    for _ in range(3):
        site.cluster.wait(run(["sbatch", "--parsable", *words], env=site.environment(own), cwd=folder).stdout.strip())
        log = (folder / "log").read_text()
        if not startup_failed(log):
            break
    printed = [json.loads(line[line.index("[") :]) for line in log.splitlines() if "own.py" in line]
    assert len({line[0] for line in printed}) == 2, log
    ((prefix, tool),) = {(line[1], line[3]) for line in printed}
    assert prefix == tool and Path(DISK) in Path(prefix).parents
